"""The page where it is read: in a real browser, by pointer, by keyboard, on a phone, on paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.browser import Page
from tests.report.examples import (
    HOSTILE,
    LAYERS,
    MIXED,
    NORM,
    config,
    rows,
    sweep,
    troubled,
    write_run,
)

Shown = Callable[..., Page]

CHARTS = "[...document.querySelectorAll('svg[data-chart]')]"
# The charts in which something is drawn that has an extent on the screen.
DRAWN = f"""{CHARTS}.filter(svg => [...svg.querySelectorAll(
    'path[data-name], circle[data-tip], rect[data-tip], image')].some(mark => {{
        const box = mark.getBoundingClientRect();
        return box.width + box.height > 0; }})).map(svg => svg.dataset.chart)"""
# What stands below a chart about the point that is read off it.
READING = "document.querySelector('[data-chart={}] ~ .reading').textContent"
RUNS = "[...document.querySelectorAll('#runs tbody tr[data-run]')].map(row => row.dataset.run)"


def assert_quiet(page: Page) -> None:
    assert page.complaints == []
    assert page.requests == []
    assert page.ask("document.documentElement.dataset.ready") == "true"


def drawn(page: Page) -> set[str]:
    return set(page.ask(DRAWN))


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
    assert page.ask(f"{CHARTS}.length") == len(drawn(page))
    curves = "document.querySelectorAll('[data-chart=norm-norm] .level').length"
    assert page.ask(curves) == 4


def test_each_mode_has_its_own_axis(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", MIXED, steps=120, what_if=(0.01, 0.1, 0.5)))
    assert_quiet(page)
    modes = ("norm", "value", "adaptive")
    for chart in ("metric", "norm", "ratio", "coef", "predicted"):
        assert {f"{chart}-{mode}" for mode in modes} <= drawn(page)
    # Of ‖G‖ itself, only the thresholds of clip=norm are values.
    levels = f"{CHARTS}.filter(s => s.querySelector('.level')).map(s => s.dataset.chart)"
    assert set(page.ask(levels)) == {"norm-norm", "histogram"}
    low, high = (
        page.ask(f"document.querySelector('[data-chart=metric-{mode}]').dataset.x").split()[:2]
        for mode in ("norm", "value")
    )
    assert low != high


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
    knots = "document.querySelectorAll('[data-chart=eval-loss] .knot').length"
    assert page.ask(knots) == 1
    page.ask("document.querySelector('[data-chart=eval-loss]').focus()")
    page.press("ArrowRight", 39)
    assert page.ask(READING.format("eval-loss")).startswith("norm 1: ")


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


def test_text_of_configurations_is_inert(tmp_path: Path, shown: Shown) -> None:
    page = shown(troubled(tmp_path / HOSTILE.replace("/", "_")))
    assert_quiet(page)
    assert page.ask("window.broken") is None
    assert page.ask("document.images.length") == 0
    assert page.ask("document.scripts.length") == 1
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
    marks = (
        "[...document.querySelectorAll('[data-chart=loss] .lost title')].map(t => t.textContent)"
    )
    (mark,) = page.ask(marks)
    assert "NaN at step 193" in mark


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


def test_arrow_keys_read_values_off(tmp_path: Path, shown: Shown) -> None:
    folder = sweep(tmp_path / "s", NORM[:2], steps=100)
    page = shown(folder)
    reading = READING.format("eval-loss")
    page.ask("document.querySelector('[data-chart=eval-loss]').focus()")
    assert page.ask(reading) == ""
    page.press("ArrowRight", 39)
    step_10 = page.ask(reading)
    page.press("ArrowRight", 39)
    step_20 = page.ask(reading)
    page.press("ArrowDown", 40)
    other = page.ask(reading)
    name, value, step = re.fullmatch(r"(.+): ([\d.]+) at ([\d.]+)", step_20).groups()
    assert name == "norm 0.1"
    assert float(step) == pytest.approx(20, rel=0.02)
    made = rows("norm", 0.1, 100, seed=0)
    assert float(value) == pytest.approx(made[19]["eval/loss"], rel=0.02)
    assert step_10 != step_20
    assert other.startswith("norm 0.25: ")
    page.press("Escape", 27)
    assert page.ask(reading) == ""


def test_every_control_is_reached_by_tab_alone(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM[:2], steps=60))
    count = "document.querySelectorAll('button, a, summary, svg[data-x], [tabindex]').length"
    reached = set()
    at = "document.activeElement"
    for _ in range(page.ask(count) + 5):
        page.press("Tab", 9)
        reached.add(page.ask(f"{at}.dataset.chart ?? {at}.tagName"))
    assert {"BUTTON", "A", "SUMMARY", "loss", "norm-norm", "histogram"} <= reached


def test_a_setting_can_be_hidden_and_shown_again(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=60))
    visible = "document.querySelectorAll('[data-chart=loss] .curve:not(.away)').length"
    assert page.ask(visible) == 4
    page.ask("document.querySelectorAll('#key button')[1].focus()")
    page.press("Enter", 13)
    assert page.ask(visible) == 3
    assert page.ask("document.querySelectorAll('#key button')[1].ariaPressed") == "false"
    page.press("Enter", 13)
    assert page.ask(visible) == 4


def test_the_pointer_reads_a_spike(tmp_path: Path, shown: Shown) -> None:
    made = rows(steps=5000, seed=3, evaluations=0)
    made[2222]["grad/norm"] = 4321.0
    page = shown(write_run(tmp_path / "run", made, config()))
    page.ask("document.querySelector('[data-chart=norm-norm]').scrollIntoView()")
    spot = page.ask(
        """(() => {
        const svg = document.querySelector('[data-chart=norm-norm]');
        const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
        const drawn = svg.querySelector('.fine').getAttribute('d');
        const points = [...drawn.matchAll(/[ML]([\\d.]+) ([\\d.]+)/g)].map(p => [+p[1], +p[2]]);
        const [x, y] = points.sort((a, b) => a[1] - b[1])[0];
        return [box.left + x * scale, box.top + y * scale]; })()"""
    )
    page.point(*spot)
    reading = page.ask(READING.format("norm-norm"))
    value, step = re.search(r": ([\d.]+) at ([\d.]+)", reading).groups()
    assert float(value) == pytest.approx(4321, rel=0.01)
    assert float(step) == pytest.approx(2223, rel=0.01)


@pytest.mark.parametrize("width", [360, 820, 1280])
def test_it_fits_a_phone(tmp_path: Path, shown: Shown, width: int) -> None:
    page = shown(troubled(tmp_path / "s"), width=width)
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.ask(f"Math.max(...{CHARTS}.map(s => s.getBoundingClientRect().right))") <= width


def test_paper_shows_it_all(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", [*NORM, ("none", None)], seeds=(0, 1), steps=80))
    pdf = page.printed()
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) <= 8
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


def test_without_scripts_table_and_charts_stand(tmp_path: Path, shown: Shown) -> None:
    page = shown(sweep(tmp_path / "s", NORM, steps=60), scripts=False)
    assert page.complaints == []
    found = page.send("DOM.getDocument", depth=-1)["root"]["nodeId"]
    for selector, count in (("#runs tbody tr", 4), ("svg[data-chart]", 9)):
        nodes = page.send("DOM.querySelectorAll", nodeId=found, selector=selector)["nodeIds"]
        assert len(nodes) == count
        assert all(page.send("DOM.getBoxModel", nodeId=node)["model"]["height"] for node in nodes)


def test_the_browser_would_tell_of_an_error_and_of_a_request(tmp_path: Path, shown: Shown) -> None:
    # Guards the two assertions above: they see what they are there to see.
    page = shown(write_run(tmp_path / "run", rows(steps=5), config()))
    file = tmp_path / "bad.html"
    file.write_text("<img src='file:///no/such.png'><script>nowhere()</script>")
    bad = Page.show(page.browser, file)
    assert any("nowhere" in complaint for complaint in bad.complaints)
    assert bad.requests == ["file:///no/such.png"]
