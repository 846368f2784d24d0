"""The page where it is read: in a real browser, by pointer, by keyboard, on a phone, on paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.process import wait_for
from tests.report.browser import Page
from tests.report.examples import (
    HOSTILE,
    LAYERS,
    MIXED,
    NORM,
    config,
    rates,
    rows,
    sweep,
    troubled,
    write_run,
)

Shown = Callable[..., Page]

CHARTS = "[...document.querySelectorAll('figure[data-chart]')]"
NAMES = f"{CHARTS}.map(figure => figure.dataset.chart)"
# The charts in which something is drawn that has an extent on the screen.
DRAWN = f"""{CHARTS}.filter(figure => [...figure.querySelectorAll(
    '.cartesianlayer .trace path, .cartesianlayer .heatmaplayer image')].some(mark => {{
        const box = mark.getBoundingClientRect();
        return box.width + box.height > 0; }})).map(figure => figure.dataset.chart)"""
PLOT = "document.querySelector('#chart-{} .plot')"
# What a chart tells about the point that is read off it.
READING = "document.querySelector('#chart-{} .reading').textContent"
DASHED = "t => /^threshold of|· p/.test(t.name) && t.line.dash.includes('px')"
RUNS = "[...document.querySelectorAll('#runs tbody tr[data-run]')].map(row => row.dataset.run)"


def assert_quiet(page: Page) -> None:
    page.take(page.file)
    assert page.complaints == []
    assert page.requests == []
    assert page.ask("document.documentElement.dataset.ready") == "true"


def drawn(page: Page) -> set[str]:
    """Make the window as high as the page, so that every chart is near, and wait for them."""
    page.resize(1280, page.ask("document.documentElement.scrollHeight") + 100)
    page.until(f"{DRAWN}.length === {CHARTS}.length")
    return set(page.ask(DRAWN))


def near(page: Page, chart: str) -> str:
    """Scroll to a chart, and return the expression of its plot."""
    page.ask(f"document.querySelector('#chart-{chart}').scrollIntoView({{block: 'center'}})")
    plot = PLOT.format(chart)
    assert page.until(f"Boolean({plot}._fullLayout?._plots)")
    page.draws()
    return plot


def area(page: Page, chart: str) -> tuple[float, float, float, float]:
    """The area inside the axes: left, top, width and height."""
    box = f"document.querySelector('#chart-{chart} .nsewdrag').getBoundingClientRect()"
    return tuple(page.ask(f"(b => [b.left, b.top, b.width, b.height])({box})"))


def spot(page: Page, chart: str, x: float, y: float) -> tuple[float, float]:
    """The place of a value on the screen."""
    axes = f"{PLOT.format(chart)}._fullLayout"
    left, top, *_ = area(page, chart)
    across = page.ask(f"{axes}.xaxis.d2p({x})")
    return left + across, top + page.ask(f"{axes}.yaxis.d2p({y})")


def middle(page: Page, selector: str) -> tuple[float, float]:
    page.ask(f"document.querySelector(`{selector}`).scrollIntoView({{block: 'center'}})")
    box = f"document.querySelector(`{selector}`).getBoundingClientRect()"
    return tuple(page.ask(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})"))


def press_heading(page: Page, key: str) -> None:
    page.ask(f"document.querySelector('#runs th[data-key=\"{key}\"] button').focus()")
    page.press("Enter", 13)


def test_a_sweep_draws_every_chart_and_asks_for_nothing(tmp_path: Path, shown: Shown) -> None:
    folder = sweep(tmp_path / "s", [*NORM, ("none", None)], steps=120, layers=LAYERS)
    page = shown(folder)
    assert_quiet(page)
    assert drawn(page) == {
        "metric-norm",
        "loss",
        "eval-loss",
        "eval-accuracy",
        "norm-norm",
        "ratio-norm",
        "coef-norm",
        "histogram",
        "predicted-norm",
        *(f"heat-{number}" for number in range(5)),
    }
    assert_quiet(page)
    assert page.ask(f"{CHARTS}.length") == len(drawn(page))
    plot = PLOT.format("norm-norm")
    assert sorted(page.ask(f"{plot}.data.filter({DASHED}).map(t => t.y[0])")) == [0.1, 0.25, 1, 2]


def test_each_mode_has_its_own_axis(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", MIXED, steps=120, what_if=(0.01, 0.1, 0.5)))
    assert_quiet(page)
    modes = ("norm", "value", "adaptive")
    shown_ = drawn(page)
    for chart in ("metric", "norm", "coef", "predicted"):
        assert {f"{chart}-{mode}" for mode in modes} <= shown_
    # Of value and adaptive, nearly every step is clipped somewhere: what counts is how much of it.
    assert {"ratio-norm", "fraction-value", "fraction-adaptive"} <= shown_
    assert not {"ratio-value", "ratio-adaptive", "fraction-norm"} & shown_
    # Of ‖G‖ itself, only the thresholds of clip=norm are values.
    plots = f"{CHARTS}.filter(f => f.querySelector('.plot').data.some({DASHED}))"
    assert set(page.ask(f"{plots}.map(f => f.dataset.chart)")) == {"norm-norm", "histogram"}

    def ends(chart: str, axis: str) -> list[float]:
        return page.ask(f"{PLOT.format(chart)}._fullLayout.{axis}.range")

    assert ends("metric-norm", "xaxis") != ends("metric-value", "xaxis")
    # Charts that are compared have one vertical axis.
    for chart in ("metric", "norm", "coef"):
        one, *others = (ends(f"{chart}-{mode}", "yaxis") for mode in modes)
        assert others == [one, one]


@pytest.mark.parametrize("finished", [True, False])
def test_one_run_is_a_page_too(tmp_path: Path, shown: Shown, finished: bool) -> None:
    made = rows(steps=80)
    folder = write_run(
        tmp_path / "run", made, config(), state="finished" if finished else "running"
    )
    page = shown(folder)
    assert_quiet(page)
    assert {"loss", "norm-norm", "ratio-norm", "coef-norm", "histogram"} <= drawn(page)
    verdict = page.ask("document.querySelector('#verdict').textContent")
    assert ("finished after 80 steps" if finished else "was killed after 80 steps") in verdict


def test_a_single_evaluation_is_seen(tmp_path: Path, shown: Shown) -> None:
    made = rows(steps=40, evaluations=1)
    page = shown(write_run(tmp_path / "run", made, config()))
    assert_quiet(page)
    plot = near(page, "eval-loss")
    assert page.ask("document.querySelectorAll('#chart-eval-loss .point').length") == 1
    page.ask(f"{plot}.focus()")
    page.press("ArrowRight", 39)
    assert page.until(f"{READING.format('eval-loss')}.startsWith('norm 1: ')")


def test_no_run_is_a_page_that_says_so(tmp_path: Path, shown: Shown) -> None:
    (tmp_path / "sweep.json").write_text('{"name": "empty", "runs": []}')
    page = shown(tmp_path)
    assert_quiet(page)
    assert "holds no run" in page.ask("document.querySelector('#verdict').textContent")
    assert page.ask(f"{CHARTS}.length") == 0


def test_a_run_without_a_single_row_shows(tmp_path: Path, shown: Shown) -> None:
    page = shown(write_run(tmp_path / "run", [], config(), state="failed", error="no data"))
    assert_quiet(page)
    assert "no data" in page.ask("document.querySelector('#remarks').textContent")


def test_runs_without_a_row_have_links_that_do_no_harm(tmp_path: Path, shown: Shown) -> None:
    for number in range(2):
        write_run(
            tmp_path / "s" / str(number), [], config(seed=number), state="failed", error="OOM"
        )
    page = shown(tmp_path / "s")
    page.ask("document.querySelector('#runs a').click()")
    assert_quiet(page)


def test_text_of_configurations_is_inert(tmp_path: Path, shown: Shown) -> None:
    page = shown(troubled(tmp_path / HOSTILE.replace("/", "_")))
    assert_quiet(page)
    assert page.ask("window.broken") is None
    assert page.ask("document.images.length") == 0
    runs = "[...document.scripts].filter(one => one.type !== 'application/json').length"
    assert page.ask(runs) == 2
    assert drawn(page)
    assert_quiet(page)
    assert page.ask("window.broken") is None
    assert page.ask("document.querySelectorAll('img, foreignObject').length") == 0
    cells = "[...document.querySelectorAll('#runs td')].map(cell => cell.textContent)"
    assert HOSTILE in page.ask(cells)
    assert HOSTILE in page.ask("document.querySelector('#files').textContent")


def test_a_foreign_script_would_not_run_even_in_the_page(tmp_path: Path, shown: Shown) -> None:
    page = shown(write_run(tmp_path / "run", rows(steps=5), config()))
    file = tmp_path / "tampered.html"
    whole = (tmp_path / "run" / "report.html").read_text()
    planted = "<script>window.broken=1</script><img src='https://example.invalid/a.png'></body>"
    file.write_text(whole.replace("</body>", planted))
    tampered = Page.show(page.browser, file)
    assert tampered.ask("window.broken") is None
    assert tampered.ask("document.documentElement.dataset.ready") == "true"
    assert len(tampered.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in tampered.complaints)


def test_lost_and_killed_runs_show_as_such(tmp_path: Path, shown: Shown) -> None:
    page = shown(troubled(tmp_path / "s"))

    def text(run: int, key: str) -> str:
        keys = page.ask("[...document.querySelectorAll('#runs thead th')].map(h => h.dataset.key)")
        row = f"document.querySelector('#runs tr[data-run=\"{run}\"]')"
        return str(page.ask(f"{row}.cells[{keys.index(key)}].textContent"))

    assert text(6, "final eval/loss") == "NaN"
    # The loss doubles from step 181 on, and is over twice its start a few steps later.
    assert 181 <= int(text(6, "diverged_at")) <= 193
    assert "failed" in text(7, "state")
    assert "killed" in text(8, "state")
    assert "not started" in text(9, "state")
    assert text(8, "steps") == "77"
    plot = near(page, "loss")
    (mark,) = page.ask(f"{plot}.data.filter(t => t.yaxis === 'y2').map(t => t.hovertext[0])")
    assert "NaN at step 193" in mark
    assert page.ask("document.querySelectorAll('#chart-loss .xy2 .point').length") == 1
    near(page, "metric-norm")
    texts = page.ask(f"{PLOT.format('metric-norm')}.data.map(t => String(t.hovertext)).join()")
    assert "run 6: best eval/loss NaN" in texts
    assert "(failed)" in texts
    assert "(killed)" in texts


def test_a_heading_sorts_and_sorts_the_other_way(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", [*NORM, ("none", None)], steps=100))
    assert page.ask(RUNS) == ["0", "1", "2", "3", "4"]
    key = "clip/ratio_total"
    press_heading(page, key)
    column = "document.querySelector('#runs th[aria-sort=ascending]').cellIndex"
    rows_ = "[...document.querySelectorAll('#runs tr[data-run]')]"
    values = f"{rows_}.map(row => +row.cells[{column}].dataset.value)"
    rising = page.ask(values)
    assert rising == sorted(rising)
    press_heading(page, key)
    assert page.ask(RUNS) == ["0", "1", "2", "3", "4"]
    press_heading(page, "clip.threshold")
    # By size and not by letters; a word after all numbers.
    assert page.ask(RUNS) == ["0", "1", "2", "3", "4"]


def test_what_is_not_a_number_sorts_last_both_ways(tmp_path: Path, shown: Shown) -> None:
    page = shown(troubled(tmp_path / "s"))
    for _ in range(2):
        press_heading(page, "final eval/loss")
        assert page.ask(RUNS)[-2:] in (["6", "9"], ["9", "6"])


def test_sorting_keeps_the_seeds_of_a_setting_together(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:3], seeds=(0, 1, 2), steps=80))
    press_heading(page, "best eval/loss")
    press_heading(page, "best eval/loss")
    order = page.ask(RUNS)
    assert sorted(map(int, order)) == list(range(9))
    assert [int(number) // 3 for number in order[::3]] == [int(n) // 3 for n in order[2::3]]
    first = "[...document.querySelectorAll('#runs tbody')].map(b => b.rows[0].className)"
    assert all("mean" in name for name in page.ask(first))


def test_a_click_sorts_too(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=60))
    for order in (["0", "1", "2", "3"], ["3", "2", "1", "0"]):
        page.click(*middle(page, "#runs th[data-key=run] button"))
        assert page.ask(RUNS) == order


@pytest.mark.parametrize("by", ["mouse", "Enter"])
def test_a_setting_becomes_the_baseline_and_the_best_one_again(
    tmp_path: Path, shown: Shown, by: str
) -> None:
    """Δ, its interval and p are those of scipy, for each setting as the baseline."""
    losses = np.array([[0.10, 0.21, 0.28], [0.12, 0.20, 0.33], [0.50, 0.62, 0.69]])
    for setting, of_seeds in enumerate(losses):
        for seed, loss in enumerate(of_seeds):
            made = rows("norm", 0.5 + setting, 20, evaluations=0)
            made[-1]["eval/loss"] = loss
            of = config(clip__threshold=0.5 + setting, seed=seed, model__name=HOSTILE)
            write_run(tmp_path / "s" / str(3 * setting + seed), made, of)
    page = shown(tmp_path / "s")

    def column(key: str, attribute: str) -> list[str]:
        cell = f"row.cells[document.querySelector('#runs th[data-key={key}]').cellIndex]"
        return page.ask(
            f"[...document.querySelectorAll('#runs tr')].slice(1).map(row => {cell}.{attribute})"
        )

    def press(setting: int) -> None:
        button = f"#setting-{setting} .baseline"
        if by == "mouse":
            page.click(*middle(page, button))
        else:
            page.ask(f"document.querySelector('{button}').focus()")
            page.press(by, 13)

    first = [column(key, "outerHTML") for key in ("difference", "p")]
    heading = "document.querySelector('#runs th[data-key=difference] button').textContent"
    pressed = "[...document.querySelectorAll('.baseline')].map(b => b.ariaPressed)"
    for chosen in (2, 1):
        press(chosen)
        assert page.ask(heading) == f"Δ to norm {0.5 + chosen}"
        assert page.ask(pressed) == [str(one == chosen).lower() for one in range(3)]
        pairs = losses - losses[chosen]
        value = np.array([float(one or "nan") for one in column("difference", "dataset.value")])
        expected = np.column_stack([pairs.mean(1), pairs]).ravel()
        expected[4 * chosen : 4 * chosen + 4] = np.nan
        assert value == pytest.approx(expected, nan_ok=True)
        tests = {i: stats.ttest_1samp(pairs[i], 0) for i in range(3) if i != chosen}
        # Two of three pairs are shown, and Holm's method counts all three.
        for i, tested in tests.items():
            low, high = tested.confidence_interval(1 - 0.05 * 2 / 3)
            text = column("difference", "textContent")[4 * i].replace("−", "-")
            shown_ = [float(part) for part in re.findall(r"[-+][\d.]+", text)]
            assert shown_ == pytest.approx([pairs[i].mean(), low, high], rel=6e-3)
        ranked = sorted(tests, key=lambda i: tests[i].pvalue)
        corrected = np.maximum.accumulate([tests[i].pvalue * (3 - k) for k, i in enumerate(ranked)])
        p = column("p", "dataset.value")
        assert [float(p[4 * i]) for i in ranked] == pytest.approx(np.minimum(corrected, 1))
    press_heading(page, "difference")
    settings = "[...document.querySelectorAll('#runs tbody')].map(body => body.id.slice(-1))"
    assert page.ask(settings) == ["0", "2", "1"]
    press(2)  # the rows are sorted by what they show now
    assert page.ask(settings) == ["0", "1", "2"]
    assert page.ask("document.activeElement.closest('tbody').id") == "setting-2"
    press(2)
    press_heading(page, "run")
    assert page.ask(pressed) == ["false"] * 3
    plain = [
        re.sub(r' title=""', "", cell)
        for key in ("difference", "p")
        for cell in column(key, "outerHTML")
    ]
    assert plain == [cell for cells in first for cell in cells]
    assert_quiet(page)


@pytest.mark.slow
def test_arrow_keys_read_values_off(tmp_path: Path, shown: Shown) -> None:
    folder = sweep(tmp_path / "s", NORM[:2], steps=100)
    page = shown(folder)
    reading = READING.format("eval-loss")
    page.ask(f"{near(page, 'eval-loss')}.focus()")
    assert page.ask(reading) == ""
    for step in (10, 20):
        page.press("ArrowRight", 39)
        page.until(f"{reading}.endsWith(' at {step}')")
    texts = dict(re.findall(r"(norm [\d.]+): ([\d.]+)", page.ask(reading)))
    for number, (name, threshold) in enumerate((("norm 0.1", 0.1), ("norm 0.25", 0.25))):
        made = rows("norm", threshold, 100, seed=number)
        assert float(texts[name]) == pytest.approx(made[19]["eval/loss"], rel=1e-3)
    page.press("ArrowLeft", 37)
    assert page.until(f"{reading}.endsWith(' at 10')")
    page.press("Escape", 27)
    assert page.ask(reading) == ""
    # Points are read one after the other.
    page.ask(f"{near(page, 'metric-norm')}.focus()")
    for run in (0, 1):
        page.press("ArrowRight", 39)
        assert page.until(f"{READING.format('metric-norm')}.includes('run {run}: best eval/loss')")
    assert_quiet(page)


@pytest.mark.slow
def test_arrow_keys_read_maps_and_nothing_where_all_is_hidden(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=60, layers=LAYERS))
    page.ask(f"{near(page, 'heat-0')}.focus()")
    page.press("ArrowRight", 39)
    reading = READING.format("heat-0")
    assert page.until(f"/^{re.escape(LAYERS[0])}, \\d+: [\\d.]+$/.test({reading})")
    for button in range(2):
        page.ask(f"document.querySelectorAll('#key button[data-group]')[{button}].click()")
    page.ask(f"{near(page, 'eval-loss')}.focus()")
    page.press("ArrowRight", 39)
    assert page.ask(READING.format("eval-loss")) == ""
    assert_quiet(page)


def test_the_pointer_reads_all_runs_and_every_chart_shows_its_step(
    tmp_path: Path, shown: Shown
) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=100))
    near(page, "eval-loss")
    left, top, width, _ = area(page, "eval-loss")
    page.point(*spot(page, "eval-loss", 50, 0.5))
    reading = READING.format("eval-loss")
    assert page.until(f"{reading}.endsWith(' at 50')")
    assert len(re.findall(r"norm [\d.]+: ", page.ask(reading))) == 4
    lines = "[...document.querySelectorAll('.hoverlayer:has(.spikeline)')]"
    assert page.until(f"{lines}.length >= 3")
    page.point(left + width / 2, top - 60)
    assert page.until(f"{lines}.length === 0") is True
    assert page.ask(reading) == ""


@pytest.mark.slow
def test_the_pointer_drags_a_zoom_and_a_double_click_resets_it(
    tmp_path: Path, shown: Shown
) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=100))
    plot = near(page, "loss")
    ends = f"{plot}._fullLayout.xaxis.range"
    before = page.ask(ends)
    left, top, width, height = area(page, "loss")
    at = top + height / 2
    page.click(left + 0.25 * width, at, to=(left + 0.75 * width, at))
    assert page.until(f"{ends}[0] > 20")
    low, high = page.ask(ends)
    assert (low, high) == pytest.approx((0.25 * before[1], 0.75 * before[1]), rel=0.05)
    # A control that draws all charts anew leaves the zoom as it is.
    page.ask("document.querySelector('#key button').click()")
    page.browser.settle(0.2)
    assert page.ask(ends) == pytest.approx([low, high])
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": left + width / 2, "y": at, "button": "left", "clickCount": count}
            page.send("Input.dispatchMouseEvent", type=kind, **place)
    assert page.until(f"{ends}[0] === {before[0]}")
    assert_quiet(page)


@pytest.mark.slow
def test_keys_zoom_and_reset(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=100))
    plot = near(page, "loss")
    ends = f"{plot}._fullLayout.xaxis.range"
    before = page.ask(ends)
    page.ask(f"{plot}.focus()")
    page.press("+")
    assert page.until(f"{ends}[0] > {before[0] + 1}")
    low, high = page.ask(ends)
    assert high - low == pytest.approx((before[1] - before[0]) / 2)
    page.press("0")
    assert page.until(f"{ends}[0] === {before[0]}")
    # The buttons of the library are reached by Tab and pressed by Enter.
    page.ask(f"{plot}.querySelector('[data-val=in]').focus()")
    page.press("Enter", 13)
    assert page.until(f"{ends}[0] > {before[0] + 1}")


@pytest.mark.parametrize("by", ["mouse", "Enter", "l"])
@pytest.mark.product(every=3)
def test_a_chart_changes_to_a_logarithmic_axis_and_back(
    tmp_path: Path, shown: Shown, by: str
) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=100))
    plot = near(page, "metric-norm")
    layout = f"{plot}._fullLayout.yaxis"
    ends = page.ask(f"{layout}.range")
    assert page.ask(f"{layout}.type") == "linear"
    for kind in ("log", "linear"):
        if by == "mouse":
            page.click(*middle(page, "#chart-metric-norm .log"))
        else:
            button = "document.querySelector('#chart-metric-norm .log')"
            page.ask(f"({button if by == 'Enter' else plot}).focus()")
            page.press(by, 13 if by == "Enter" else 0)
        assert page.until(f"{layout}.type === '{kind}'")
        pressed = page.ask("document.querySelector('#chart-metric-norm .log').ariaPressed")
        assert pressed == ("true" if kind == "log" else "false")
        low, high = page.ask(f"{layout}.range")
        values = page.ask(
            f"{plot}.data.filter(t => t.mode === 'markers' && !t.yaxis).map(t => t.y[0])"
        )
        shown_ = np.log10(values) if kind == "log" else values
        assert low < min(shown_) < max(shown_) < high
    assert page.ask(f"{layout}.range") == pytest.approx(ends)
    assert_quiet(page)


@pytest.mark.parametrize("by", ["mouse", "keys"])
@pytest.mark.product(every=2)
def test_smoothing_is_the_mean_over_a_share_of_the_run(
    tmp_path: Path, shown: Shown, by: str
) -> None:
    made = rows(steps=300, seed=4)
    page = shown(write_run(tmp_path / "run", made, config()))
    plot = near(page, "loss")
    slider = "document.querySelector('#smoothing')"
    mean = f"Array.from({plot}.data.find(t => t.customdata).y)"
    first = page.ask(mean)
    if by == "mouse":
        page.ask(f"{slider}.scrollIntoView()")
        left, top, width, height = page.ask(
            f"(b => [b.left, b.top, b.width, b.height])({slider}.getBoundingClientRect())"
        )
        page.click(left + width - 4, top + height / 2)
    else:
        page.ask(f"{slider}.focus()")
        page.press("End", 35)
    assert page.until(f"{slider}.nextElementSibling.textContent === '30 %'")
    near(page, "loss")
    page.until(f"{mean}[150] !== {first[150]}")
    logs = np.log([row["train/loss"] for row in made])
    scale = page.ask(f"{plot}._fullLayout.yaxis.type")
    values = logs if scale == "log" else np.exp(logs)
    # 30 % of 300 rows are 90: the 44 before a row, itself, and the 45 after it.
    expected = values[150 - 44 : 150 + 46].mean()
    smooth = page.ask(mean)
    assert smooth[150] == pytest.approx(np.exp(expected) if scale == "log" else expected, rel=1e-5)
    assert_quiet(page)


@pytest.mark.slow
def test_pictures_are_saved_as_png_and_svg(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=100))
    target = tmp_path / "downloads"
    target.mkdir()
    page.browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(target))
    near(page, "loss")
    for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        page.ask(
            f"document.querySelector('#chart-loss [data-title=\"Download as {kind}\"]').click()"
        )
        file = target / f"loss.{kind.lower()}"
        wait_for(lambda file=file: file.exists() and file.stat().st_size)
        assert file.read_bytes().startswith(start)
    assert "Training loss" in file.read_text()
    assert_quiet(page)


def test_a_run_of_the_sweep_is_shown_alone(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], seeds=(0, 1), steps=80))
    plot = near(page, "loss")
    names = f"[...new Set({plot}.data.filter(t => t.visible).map(t => t.name))]"
    assert len(page.ask(names)) == 4
    page.ask("document.querySelector('#runs a[href=\"#run-2\"]').focus()")
    page.press("Enter", 13)
    near(page, "loss")
    assert page.until(f"{names}.length === 1")
    assert page.ask(names) == ["norm 0.25 · run 2"]
    panel = page.ask("document.querySelector('#selected').textContent")
    assert "Run 2" in panel
    assert "clip.threshold=0.25 seed=0" in panel
    assert page.ask("document.querySelector('#selected a').getAttribute('href')").startswith("2/")
    page.click(*middle(page, "#selected button"))
    near(page, "loss")
    assert page.until(f"{names}.length === 4")
    assert page.ask("document.querySelector('#selected').hidden") is True
    assert_quiet(page)


def test_colours_follow_the_screen_and_paper_is_white(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=80))
    plot = near(page, "loss")
    looks = f"""(() => {{
        const back = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
        const lines = [...{plot}.querySelectorAll('.trace .js-line')].map(line =>
            getComputedStyle(line).stroke.match(/\\d+/g).map(Number));
        const text = getComputedStyle({plot}.querySelector('.xtick text')).fill;
        return [back, text.match(/\\d+/g).map(Number), ...lines]; }})()"""
    for scheme in ("light", "dark", "light"):
        dark = str(scheme == "dark").lower()
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.send("Emulation.setEmulatedMedia", features=features)
        page.until(f"({looks}[0].reduce((sum, one) => sum + one) < 150) === {dark}")
        page.draws()
        back, text, *lines = page.ask(looks)
        assert (sum(back) < 150) == (scheme == "dark")
        assert contrast(text, back) > 7
        assert all(contrast(line, back) > 1.8 for line in lines)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.send("Emulation.setEmulatedMedia", features=features)
    page.ask("dispatchEvent(new Event('beforeprint'))")
    assert page.ask(f"{plot}._fullLayout.paper_bgcolor") == "#ffffff"
    page.ask("dispatchEvent(new Event('afterprint'))")
    assert page.ask(f"{plot}._fullLayout.paper_bgcolor") != "#ffffff"
    assert_quiet(page)


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast of two colours as WCAG 2.2 defines it: from 1 to 21."""

    def luminance(color: list[float]) -> float:
        parts = [c / 255 for c in color[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_learning_rates_and_keys_have_charts(tmp_path: Path, shown: Shown) -> None:
    page = shown(rates(tmp_path / "s", seeds=(0,), momenta=(0.0, 0.9)))
    assert {"metric-norm", "map-norm", "rate-norm", "parallel"} <= drawn(page)
    assert_quiet(page)


def test_every_control_is_reached_by_tab_alone(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=60))
    drawn(page)
    count = "document.querySelectorAll('button, a, summary, input, [tabindex]').length"
    reached = set()
    at = "document.activeElement"
    for _ in range(page.ask(count) + 5):
        page.press("Tab", 9)
        reached.add(page.ask(f"{at}.ariaLabel || {at}.className || {at}.id || {at}.tagName"))
    assert {"BUTTON", "A", "SUMMARY", "log", "smoothing"} <= reached
    assert {"Download as PNG", "Download as SVG", "Zoom", "Pan", "Zoom in", "Reset axes"} <= reached
    for title in ("Training loss", "Gradient norm ‖G‖", "Norms before clipping"):
        assert any(str(one).startswith(f"{title}. ") for one in reached)


@pytest.mark.parametrize("by", ["mouse", "Enter"])
def test_a_setting_is_hidden_in_all_charts_and_shown_again(
    tmp_path: Path, shown: Shown, by: str
) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=60))
    drawn(page)
    visible = f"""{CHARTS}.map(figure => figure.querySelector('.plot').data.filter(
        t => t.visible && t.meta?.group === 1).length).reduce((a, b) => a + b)"""
    every = page.ask(visible)
    assert every >= 9
    button = "#key button[data-group='1']"
    for left in (0, every):
        if by == "mouse":
            page.click(*middle(page, button))
        else:
            page.ask(f"document.querySelector(`{button}`).focus()")
            page.press(by, 13)
        assert page.until(f"{visible} === {left}")
        assert (
            page.ask(f"document.querySelector(`{button}`).ariaPressed") == str(bool(left)).lower()
        )
        assert page.ask("document.querySelectorAll('tbody.dim').length") == (0 if left else 1)
    assert_quiet(page)


def test_the_pointer_reads_a_spike(tmp_path: Path, shown: Shown) -> None:
    made = rows(steps=5000, seed=3, evaluations=0)
    made[2222]["grad/norm"] = 4321.0
    page = shown(write_run(tmp_path / "run", made, config()))
    near(page, "norm-norm")
    values = f"Array.from({PLOT.format('norm-norm')}.data[0].y)"
    assert max(page.ask(values)) == 4321  # the thinned curve reaches it
    page.point(*spot(page, "norm-norm", 2223, 1000))
    text = "document.querySelector('#chart-norm-norm .hoverlayer').textContent"
    assert page.until(f"{text}.includes('max 4321')")
    at = re.search(r" at ([\d.]+)$", page.ask(READING.format("norm-norm"))).group(1)
    assert float(at) == pytest.approx(2223, rel=0.01)


@pytest.mark.parametrize("width", [360, 820, 1280])
def test_it_fits_a_phone(tmp_path: Path, shown: Shown, width: int) -> None:
    page = shown(troubled(tmp_path / "s"), width=width)
    page.resize(width, page.ask("document.documentElement.scrollHeight") + 100)
    page.until(f"{DRAWN}.length === {CHARTS}.length")
    assert page.ask("document.documentElement.scrollWidth") <= width
    parts = "[...document.querySelectorAll('figure, .main-svg')]"
    assert page.ask(f"Math.max(...{parts}.map(s => s.getBoundingClientRect().right))") <= width
    assert_quiet(page)


def test_names_and_labels_fit_a_phone(tmp_path: Path, shown: Shown) -> None:
    folder = sweep(tmp_path / "s", [("norm", 0.25), ("norm", 0.5)], steps=60, layers=LAYERS)
    page = shown(folder, width=390)
    page.resize(390, page.ask("document.documentElement.scrollHeight") + 100)
    page.until(f"{DRAWN}.length === {CHARTS}.length")
    texts = f"{PLOT.format('heat-0')}.querySelectorAll('.ytick text')"
    names = page.ask(f"[...{texts}].map(text => text.textContent)")
    assert len(set(names)) == len(LAYERS)
    assert {"s0.b0.conv.weight", "head.bias"} <= set(names)
    left = f"Math.min(...[...{texts}].map(text => text.getBoundingClientRect().left))"
    assert page.ask(left) >= page.ask(f"{PLOT.format('heat-0')}.getBoundingClientRect().left")
    box = "(b => [b.left, b.right, b.top, b.bottom])(text.getBoundingClientRect())"
    points_ = f"{PLOT.format('histogram')}.querySelectorAll('.textpoint')"
    boxes = page.ask(f"[...{points_}].map(text => {box})")
    assert len(boxes) == 2
    (_, right, top, bottom), (left_, _, top_, bottom_) = sorted(boxes)
    assert right < left_ or bottom < top_ or bottom_ < top
    caption = "document.querySelector('#runs caption span').getBoundingClientRect().right"
    assert page.ask(caption) <= 390


def test_paper_shows_it_all(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", [*NORM, ("none", None)], seeds=(0, 1), steps=80))
    assert 2 <= pages(page.printed()) <= 4
    page.send("Emulation.setEmulatedMedia", media="print")
    # A4 on its side less its margins, at 96 pixels an inch.
    page.resize(1031, 700)
    whole = "[...document.querySelectorAll('table, figure')]"
    right = f"Math.max(...{whole}.map(one => one.getBoundingClientRect().right))"
    assert page.ask(right) <= 1031
    # Folds open for paper, and close again.
    page.ask("dispatchEvent(new Event('beforeprint'))")
    assert page.ask("document.querySelectorAll('details:not([open])').length") == 0
    page.ask("dispatchEvent(new Event('afterprint'))")
    assert page.ask("document.querySelectorAll('details:not([open])').length") > 0


def pages(pdf: bytes) -> int:
    assert pdf.startswith(b"%PDF")
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


@pytest.mark.slow
def test_four_runs_are_three_pages_of_paper_at_most(tmp_path: Path, shown: Shown) -> None:
    # With the 93 keys of a whole configuration, which the page lists.
    others = {f"section{i}": {f"key{j}": j for j in range(7)} for i in range(10)}
    for number, (mode, threshold) in enumerate(NORM):
        of = config(clip__mode=mode, clip__threshold=threshold) | others
        words = (f"clip={mode}", f"clip.threshold={threshold}")
        write_run(tmp_path / "s" / str(number), rows(mode, threshold, 200), of, overrides=words)
    for width in (1280, 390):
        page = shown(tmp_path / "s", width=width)
        assert 1 <= pages(page.printed()) <= 3
        assert_quiet(page)


def test_without_scripts_verdict_table_and_a_sentence_stand(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=60), scripts=False)
    assert page.complaints == []
    root = page.send("DOM.getDocument", depth=-1)["root"]["nodeId"]
    for selector, count in (("#verdict", 1), ("#runs tbody tr", 4), ("noscript p", 1)):
        nodes = page.send("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]
        assert len(nodes) == count
        assert all(page.send("DOM.getBoxModel", nodeId=node)["model"]["height"] for node in nodes)
    # Nothing of the charts takes place, and a run's number leads to its files.
    (node,) = page.send("DOM.querySelectorAll", nodeId=root, selector="#charts")["nodeIds"]
    with pytest.raises(RuntimeError):
        page.send("DOM.getBoxModel", nodeId=node)


def test_the_browser_would_tell_of_an_error_and_of_a_request(tmp_path: Path, shown: Shown) -> None:
    # Guards the two assertions above: they see what they are there to see.
    page = shown(write_run(tmp_path / "run", rows(steps=5), config()))
    file = tmp_path / "bad.html"
    file.write_text("<img src='file:///no/such.png'><script>nowhere()</script>")
    bad = Page.show(page.browser, file)
    assert any("nowhere" in complaint for complaint in bad.complaints)
    assert bad.requests == ["file:///no/such.png"]
