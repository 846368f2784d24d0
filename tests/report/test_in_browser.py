"""The page in a real browser: by keyboard, by day and night, on a phone."""

import re

import numpy as np
import pytest

from runner.report import write
from tests.report.browser import Browser, Page
from tests.report.examples import HOSTILE, LAYERS, rows, trained, troubled

pytestmark = pytest.mark.xdist_group("browser")

# Whether labels of one kind in a chart overlap.
COVERED = """(plot => ['.xtick', '.ytick', '.textpoint'].some(kind => {
    const boxes = [...plot.querySelectorAll(`${kind} text`)].map(t => t.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some(b => a.width && b.width &&
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)); }))"""
PLOT = "document.querySelector('#chart-{} .plot')"
READING = "document.querySelector('#chart-{} .reading').textContent"
RUNS = "[...document.querySelectorAll('#runs tbody tr[data-run]')].map(row => row.dataset.run)"
SETTINGS = "[...document.querySelectorAll('#runs tbody')].map(body => body.id.slice(-1))"
LOSSES = np.array([[0.10, 0.21, 0.28], [0.12, 0.20, 0.33], [0.50, 0.62, 0.69]])


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
    """Charts fill their rows and end with the page; no label covers another one."""
    assert {"loss", "eval-loss", "norm-norm", "clipped-norm", "histogram"} <= page.draw()
    assert page.ask("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('figure, .main-svg, #runs caption span')]"
    assert page.ask(f"Math.max(...{parts}.map(s => s.getBoundingClientRect().right))") <= width
    wide = "[...document.querySelectorAll('.charts')].every(row => row.lastElementChild"
    wide += ".getBoundingClientRect().right > row.getBoundingClientRect().right - 2)"
    assert page.ask(wide)
    assert page.ask(f"[...document.querySelectorAll('.plot')].filter({COVERED}).length") == 0


def test_a_sweep_fits_on_a_phone(browser, swept):
    page = Page(browser, swept, 390)
    assert_fits(page, 390)
    names = f"{PLOT.format('heat-0')}.querySelectorAll('.ytick text')"
    assert len(set(page.ask(f"[...{names}].map(t => t.textContent)"))) == len(LAYERS)
    # Where the table goes on, the shadow at its edge is seen through every row.
    best = "getComputedStyle(document.querySelector('tr.best > td'))"
    assert page.ask(f"{best}.backgroundColor") == "rgba(0, 0, 0, 0)"
    assert_quiet(page)


def test_a_run_is_drawn_by_day_and_night_and_on_paper(browser, swept):
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
    paper = f"{PLOT.format('loss')}._fullLayout.paper_bgcolor"
    closed = "details:not([open])"
    for event in ("beforeprint", "afterprint"):
        page.ask(f"dispatchEvent(new Event('{event}'))")
        assert (page.ask(paper) == "#ffffff") == (event == "beforeprint")
        folds = page.ask(f"document.querySelectorAll('{closed}').length")
        assert (folds == 0) == (event == "beforeprint")
    assert_quiet(page)


def test_the_table_sorts_and_selects_and_keys_read_and_smooth_the_charts(browser, swept):
    page = Page(browser, swept)
    assert page.ask(RUNS) == list("012345678")
    cell = "row.cells[document.querySelector('#runs th[data-key=difference]').cellIndex]"
    column = f"[...document.querySelectorAll('#runs tr')].slice(1).map(row => {cell}.dataset.value)"
    pairs = LOSSES - LOSSES[0]
    expected = np.column_stack([pairs.mean(1), pairs]).ravel()
    expected[:4] = np.nan
    differences = [float(text or "nan") for text in page.ask(column)]
    assert differences == pytest.approx(expected, nan_ok=True)
    for order in (["0", "1", "2"], ["2", "1", "0"]):  # the seeds of a setting stay together
        press(page, '#runs th[data-key="best/eval/loss"] button')
        assert page.ask(SETTINGS) == order
    assert [int(run) // 3 for run in page.ask(RUNS)] == [2] * 3 + [1] * 3 + [0] * 3

    assert_fits(page, 1280)
    names = f"[...new Set({PLOT.format('loss')}.data.filter(t => t.visible).map(t => t.name))]"
    every = len(page.ask(names))
    press(page, '#runs a[href="#run-2"]')
    page.until(f"{names}.length === 1")
    assert page.ask(names) == ["norm 0.5 · run 2"]
    assert "seed=2" in page.ask("document.querySelector('#selected').textContent")
    press(page, "#selected button")
    page.until(f"{names}.length === {every}")
    press(page, "#key button[data-group='1']")  # a setting is hidden in all charts
    page.until(f"{names}.length < {every}")
    assert page.ask("document.querySelectorAll('tbody.dim').length") == 1
    press(page, "#key button[data-group='1']")
    plot = PLOT.format("eval-loss")
    reading = READING.format("eval-loss")
    page.ask(f"{plot}.focus()")
    page.press("ArrowRight", 39)
    page.until(f"{reading}.endsWith(' at 50')")
    values = sorted(map(float, re.findall(r": ([\d.]+)", page.ask(reading))))
    assert values == pytest.approx(sorted(LOSSES.ravel() + 0.1), rel=1e-3)
    press(page, "#chart-metric-norm .log")
    page.until(f"{PLOT.format('metric-norm')}._fullLayout.yaxis.type === 'log'")
    # 30 % of 100 rows are 30: the 14 before a row, itself, and the 15 after it.
    press(page, '#runs a[href="#run-2"]')
    mean = f"Array.from({PLOT.format('loss')}.data.filter(t => t.visible && t.customdata)[0].y)"
    page.ask("document.querySelector('#smoothing').focus()")
    page.press("End", 35)
    losses = [row["train/loss"] for row in rows("norm", 0.5, 100, seed=2, layers=LAYERS)]
    near = np.asarray(losses)[50 - 14 : 50 + 16]
    log = page.ask(f"{PLOT.format('loss')}._fullLayout.yaxis.type") == "log"
    smooth = float(np.exp(np.log(near).mean()) if log else near.mean())
    page.until(f"Math.abs({mean}[50] / {smooth} - 1) < 1e-5")
    reached = set()
    active = "document.activeElement"
    for _ in range(page.ask("document.querySelectorAll('button, a, summary, [tabindex]').length")):
        page.press("Tab", 9)
        name = f"{active}.ariaLabel || {active}.className || {active}.id || {active}.tagName"
        reached.add(page.ask(name))
    assert {"BUTTON", "A", "SUMMARY", "log", "Download as PNG", "Zoom"} <= reached
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
    # Lost runs sort last, in both orders.
    for _ in range(2):
        press(page, '#runs th[data-key="final/eval/loss"] button')
        assert page.ask(RUNS)[-2:] in (["6", "9"], ["9", "6"])


def test_a_foreign_script_does_not_run_in_the_page(browser, troubled_page, tmp_path):
    planted = "<script>window.broken=1</script><img src='https://example.invalid/a.png'></body>"
    tampered = tmp_path / "tampered.html"
    tampered.write_text(troubled_page.read_text().replace("</body>", planted))
    page = Page(browser, tampered)
    assert page.ask("[window.broken, document.documentElement.dataset.ready]") == [None, "true"]
    assert len(page.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in page.complaints)
