"""The page in a real browser: its first screen, by keyboard, by day and night, on a phone."""

import re

import numpy as np
import pytest

from runner.report import write
from tests.report.browser import Browser, Page
from tests.report.examples import HOSTILE, LAYERS, MIXED, sweep, trained, troubled

pytestmark = pytest.mark.xdist_group("browser")

# Whether labels of one kind in a chart overlap.
COVERED = """(plot => ['.xtick', '.ytick', '.textpoint'].some(kind => {
    const boxes = [...plot.querySelectorAll(`${kind} text`)].map(t => t.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some(b => a.width && b.width &&
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)); }))"""
PLOT = "document.querySelector('#chart-{} .plot')"
READING = "document.querySelector('#chart-{} .reading').textContent"
SETTINGS = """[...document.querySelectorAll('#runs tbody:not([hidden])')]
    .map(body => body.dataset.setting)"""
HEIGHT = "document.documentElement.scrollHeight"
LOSSES = np.array([[0.10, 0.21, 0.28], [0.12, 0.20, 0.33], [0.50, 0.62, 0.69]])
DIM = "{}.data.filter(t => t.meta?.setting === {} && !t.meta.band && t.opacity < 0.2).length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The page of a sweep of three thresholds with three seeds, whose best losses are LOSSES."""
    losses = dict(zip((0.5, 1.5, 2.5), LOSSES.tolist(), strict=True))
    return write(trained(tmp_path_factory.mktemp("s"), losses, steps=100, layers=LAYERS))


def assert_quiet(page):
    assert page.complaints == []
    assert page.requests == []
    assert page.ask("document.documentElement.dataset.ready") == "true"


def press(page, selector):
    """Press a button by a key, where it can be seen."""
    page.ask(f"document.querySelector(`{selector}`).focus()")
    page.press("Enter", 13)


def assert_fits(page, width):
    """Charts end with the page, and so does the table; no label covers another one."""
    assert {"loss", "eval-loss", "norm", "clipped", "histogram"} <= page.draw()
    assert page.ask("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('figure, .main-svg')]"
    assert page.ask(f"Math.max(...{parts}.map(s => s.getBoundingClientRect().right))") <= width
    table = "(document.querySelector('#runs') ?? document.body)"
    assert page.ask(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")
    assert page.ask(f"[...document.querySelectorAll('.plot')].filter({COVERED}).length") == 0


def test_the_first_screen_has_the_answer(browser, swept):
    page = Page(browser, swept)
    page.resize(800)
    page.until(f"{PLOT.format('metric-threshold')}.querySelector('.main-svg') !== null")
    edges = "(selector => document.querySelector(selector).getBoundingClientRect())"
    assert page.ask(f"{edges}('#answer .plot').top") < 300
    for part in ("h1", "#words > p"):
        assert page.ask(f"{edges}('{part}').bottom") < 800
    assert page.ask("document.querySelector('h1').textContent").startswith("Which threshold? ")


def test_a_sweep_fits_on_a_phone(browser, swept):
    page = Page(browser, swept, 390)
    assert_fits(page, 390)
    names = f"{PLOT.format('heat-0')}.querySelectorAll('.ytick text')"
    assert len(set(page.ask(f"[...{names}].map(t => t.textContent)"))) == len(LAYERS)
    shown = "[...document.querySelectorAll('#runs thead th')].filter(h => h.offsetWidth)"
    keys = page.ask(f"{shown}.map(h => h.dataset.key)")
    assert keys == ["setting", "best/eval/loss", "difference", "share"]
    assert_quiet(page)


def test_a_run_is_drawn_in_the_colors_of_the_hour(browser, swept):
    page = Page(browser, write(swept.parent / "0"))
    assert_fits(page, 1280)
    bright = "(color => color.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b))"
    back = f"{bright}(getComputedStyle(document.body).backgroundColor)"
    tick = f"{PLOT.format('loss')}.querySelector('.xtick text')"
    text = f"{bright}(getComputedStyle({tick}).fill)"
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.send("Emulation.setEmulatedMedia", features=features)
        page.until(f"({back} - {text}) * {1 if scheme == 'light' else -1} > 400")
    assert_quiet(page)


def test_a_run_is_printed_on_white_paper_with_all_folds_open(browser, swept):
    page = Page(browser, write(swept.parent / "0"))
    assert_fits(page, 1280)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.send("Emulation.setEmulatedMedia", features=features)
    paper = f"{PLOT.format('loss')}._fullLayout.paper_bgcolor"
    page.until(f"{paper} !== '#ffffff'")
    closed = "details:not([open])"
    for event in ("beforeprint", "afterprint"):
        page.ask(f"dispatchEvent(new Event('{event}'))")
        assert (page.ask(paper) == "#ffffff") == (event == "beforeprint")
        folds = page.ask(f"document.querySelectorAll('{closed}').length")
        assert (folds == 0) == (event == "beforeprint")
    assert_quiet(page)


def test_a_heading_sorts_the_table(browser, swept):
    page = Page(browser, swept)
    assert page.ask(SETTINGS) == ["0", "1", "2"]
    for order in (["0", "1", "2"], ["2", "1", "0"]):
        press(page, '#runs th[data-key="best/eval/loss"] button')
        assert page.ask(SETTINGS) == order
    assert_quiet(page)


def test_a_row_folds_its_seeds_out(browser, swept):
    page = Page(browser, swept)
    seeds = "[...document.querySelectorAll('#runs tr.seed:not([hidden])')]"
    assert page.ask(f"{seeds}.length") == 0
    press(page, '#runs tbody[data-setting="1"] .fold')
    cell = "row.cells[document.querySelector('#runs th[data-key=difference]').cellIndex]"
    differences = page.ask(f"{seeds}.map(row => Number({cell}.dataset.value))")
    assert differences == pytest.approx(LOSSES[1] - LOSSES[0])
    assert_quiet(page)


def test_a_button_shows_more_columns(browser, swept):
    page = Page(browser, swept)
    page.ask("document.querySelector('#more').click()")
    assert page.ask("document.querySelector('#runs th[data-key=steps]').offsetWidth") > 0
    assert_quiet(page)


def test_a_setting_is_lifted_out_in_all_charts(browser, swept):
    page = Page(browser, swept)
    assert_fits(page, 1280)
    loss = PLOT.format("loss")
    press(page, '#runs .keep[data-setting="1"]')
    page.until(f"{DIM.format(loss, 0)} > 0 && {DIM.format(loss, 1)} === 0")
    assert page.ask(DIM.format(PLOT.format("norm"), 0)) > 0
    press(page, '#key .keep[data-setting="0"]')  # a second one compares two
    page.until(f"{DIM.format(loss, 0)} === 0 && {DIM.format(loss, 2)} > 0")
    page.press("Escape", 27)
    page.ask("document.activeElement.blur()")
    page.until(f"{DIM.format(loss, 2)} === 0")
    filtered = "document.querySelector('#filter')"
    page.ask(f"{filtered}.value = '2.5'; {filtered}.dispatchEvent(new Event('input'))")
    assert page.ask(SETTINGS) == ["2"]
    shown = f"new Set({loss}.data.filter(t => t.visible).map(t => t.meta?.setting))"
    page.until(f"{shown}.size === 1")
    assert_quiet(page)


def test_a_zoom_is_that_of_all_charts_over_steps(browser, swept):
    page = Page(browser, swept)
    assert_fits(page, 1280)
    page.ask(f"void Plotly.relayout({PLOT.format('loss')}, {{'xaxis.range': [20, 60]}})")
    page.until(f"{PLOT.format('norm')}._fullLayout.xaxis.range.map(Math.round).join() === '20,60'")
    page.ask(f"{PLOT.format('norm')}.focus()")
    page.press("0", 48)
    page.until(f"{PLOT.format('loss')}._fullLayout.xaxis.range[0] <= 0")
    assert_quiet(page)


def test_a_button_shows_the_curves_of_seeds(browser, swept):
    page = Page(browser, swept)
    page.draw()
    page.ask("document.querySelector('#seeds').click()")
    seeds = f"{PLOT.format('loss')}.data.filter(t => t.meta?.seed && t.visible).length"
    page.until(f"{seeds} === 9")
    assert_quiet(page)


def test_every_control_is_reached_by_the_keyboard(browser, swept):
    page = Page(browser, swept)
    assert_fits(page, 1280)
    plot = PLOT.format("eval-loss")
    reading = READING.format("eval-loss")
    page.ask(f"{plot}.focus()")
    page.press("ArrowRight", 39)
    page.until(f"{reading}.endsWith(' at 50')")
    values = sorted(map(float, re.findall(r": ([\d.]+)", page.ask(reading))))
    assert values == pytest.approx(sorted((LOSSES + 0.1).mean(axis=1)), rel=1e-3)
    press(page, "#chart-metric-threshold .log")
    page.until(f"{PLOT.format('metric-threshold')}._fullLayout.yaxis.type === 'log'")
    controls = "button:not(:disabled), a[href], summary, input, select, [tabindex='0']"
    shown = f"[...document.querySelectorAll(`{controls}`)].filter(c => c.checkVisibility())"
    page.ask(f"window.left = new Set({shown}.filter(c => !c.closest('.modebar, dialog')))")
    page.ask("document.body.focus(); document.activeElement.blur()")
    page.ask("document.addEventListener('focusin', ({target}) => window.left.delete(target))")
    page.ask("window.scrollTo(0, 0)")
    for _ in range(page.ask("window.left.size") + 9 * 20):
        page.press("Tab", 9)
        if page.ask("window.left.size") == 0:
            break
    missed = "[...window.left].map(c => c.outerHTML.slice(0, 90))"
    assert page.ask(missed) == []
    page.ask("document.activeElement.blur()")
    page.press("?", 191)
    assert page.ask("document.querySelector('#help').open")
    assert_quiet(page)


def test_sixty_six_runs_have_few_figures_on_a_short_page(browser, tmp_path):
    settings = [*MIXED, *[("value", 0.2 + step / 10) for step in range(12)]]
    file = write(sweep(tmp_path / "s", settings, (0, 1, 2), steps=20, layers=LAYERS[:2]))
    for width, longest in ((1280, 6_000), (390, 12_000)):
        page = Page(browser, file, width)
        assert len(page.draw()) <= 14
        assert page.ask(HEIGHT) <= longest
        assert page.ask("document.querySelector('#answer .plot').getBoundingClientRect().top") < 300
        assert_quiet(page)


@pytest.fixture
def troubled_page(tmp_path):
    return write(troubled(tmp_path / HOSTILE.replace("/", "_")))


def test_text_of_configurations_is_inert(browser, troubled_page):
    page = Page(browser, troubled_page)
    assert page.draw()
    assert_quiet(page)
    assert page.ask("window.broken") is None
    assert page.ask("document.querySelectorAll('img, foreignObject').length") == 0
    assert HOSTILE in page.ask("[...document.querySelectorAll('#runs td')].map(c => c.textContent)")
    # Lost settings sort last, in both orders.
    for _ in range(2):
        press(page, '#runs th[data-key="best/eval/loss"] button')
        last = page.ask(f"{SETTINGS}.slice(-4)")
        assert {*last} == {"2", "3", "4", "6"}


def test_a_foreign_script_does_not_run_in_the_page(browser, troubled_page, tmp_path):
    planted = "<script>window.broken=1</script><img src='https://example.invalid/a.png'></body>"
    tampered = tmp_path / "tampered.html"
    tampered.write_text(troubled_page.read_text().replace("</body>", planted))
    page = Page(browser, tampered)
    assert page.ask("[window.broken, document.documentElement.dataset.ready]") == [None, "true"]
    assert len(page.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in page.complaints)
