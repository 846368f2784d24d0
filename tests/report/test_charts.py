"""The figures that the page draws, read as JSON, and the table of the runs of a notebook."""

import json
import math
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest

from runner.report import figures, frame, read, write
from runner.report.charts import heat
from runner.report.figure import Entry
from runner.report.findings import find
from runner.report.look import HUES, NEUTRAL, on_dark, ordered, viridis
from runner.report.sections import colors_of
from tests.report.examples import (
    LAYERS,
    MIXED,
    NORM,
    config,
    rows,
    sweep,
    trained,
    troubled,
    write_run,
)

MODES = ("norm", "value", "adaptive")


def of_setting(figure, index, name=""):
    """The traces of a setting."""
    traces = [trace for trace in figure.data if (trace.meta or {}).get("setting") == index]
    return [trace for trace in traces if name in (trace.name or "")]


def levels(figure):
    return [trace for trace in figure.data if (trace.name or "").startswith("threshold of")]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A sweep of three modes and no clipping."""
    folder = tmp_path_factory.mktemp("charts") / "s"
    return sweep(folder, MIXED, steps=60, what_if=(0.1, 0.5), layers=LAYERS)


@pytest.fixture(scope="module")
def charts(mixed):
    return figures(mixed)


def test_a_sweep_over_methods_has_few_charts(charts):
    expected = {"metric-settings", "norm", "clipped", "coef", "histogram"}
    expected |= {f"what-if-{mode}" for mode in MODES} | {"loss", "eval-loss", "eval-accuracy"}
    heats = {key for key in charts if key.startswith("heat-")}
    assert heats
    assert set(charts) == expected | heats
    assert len(charts) <= 14


def test_the_page_has_the_figures(mixed, charts):
    page = write(mixed).read_text()
    assert page.count("<figure") == len(charts)
    for key, figure in charts.items():
        assert f'data-chart="{key}"' in page, key
        assert figure.to_json().replace("<", "\\u003c") in page, key


def test_only_thresholds_of_the_norm_are_drawn_among_norms(charts):
    drawn = {key for key, figure in charts.items() if levels(figure)}
    assert drawn == {"norm"}
    assert len(levels(charts["norm"])) == len(NORM)


def test_methods_are_rows_sorted_by_their_difference_to_the_best(charts):
    figure = charts["metric-settings"]
    points = [trace for trace in figure.data if trace.mode == "markers"]
    ordered = sorted(points, key=lambda trace: trace.y[0])
    differences = [trace.x[0] for trace in ordered]
    assert differences == sorted(differences)
    assert differences[0] == 0.0
    assert len(figure.layout.yaxis.ticktext) == len(MIXED)


def test_a_setting_has_one_colour_in_all_charts(charts):
    colors = {}
    for figure in charts.values():
        for trace in figure.data:
            setting = (trace.meta or {}).get("setting")
            if setting is not None and trace.type == "scatter" and trace.mode != "text":
                color = trace.marker.color or trace.line.color
                colors.setdefault(setting, set()).add(color)
    assert len(colors) == len(MIXED)
    assert all(len(shades) == 1 for shades in colors.values())


def test_a_single_run_shows_which_parameters_make_the_norm(tmp_path):
    lines = rows("norm", 0.5, 4)
    for line, shares in zip(
        lines, ({"a": 0.75, "b": 0.25}, {}, {"b": 1.0}, {"b": 0.5}), strict=True
    ):
        line |= {f"grad/top/{name}": share for name, share in shares.items()}
    write_run(tmp_path / "run", lines, config(clip__mode="norm", clip__threshold=0.5))
    [shown] = figures(tmp_path / "run")["heat-top"].data
    assert (*shown.x,) == ("1", "3", "4")
    assert (*shown.y,) == ("b", "a")
    assert shown.z.tolist() == [[0.25, 1.0, 0.5], [0.75, 0.0, 0.0]]


def test_choices_have_at_most_eight_hues(mixed):
    colors = [*colors_of(find(read(mixed))).values()]
    assert sorted({*colors} - {NEUTRAL}) == sorted(HUES)
    assert colors.count(NEUTRAL) == len(MIXED) - 8


def test_a_frame_has_one_row_a_run(mixed):
    assert len(frame(mixed)) == len(MIXED)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """A sweep of four thresholds and no clipping with three seeds, and its charts."""
    folder = tmp_path_factory.mktemp("charts") / "s"
    sweep(folder, [*NORM, ("none", None)], seeds=(0, 1, 2), steps=60)
    return find(read(folder)), figures(folder)


def test_a_threshold_axis_has_means_with_the_intervals_of_the_table(seeded):
    findings, charts = seeded
    figure = charts["metric-threshold"]
    means = {
        trace.meta["setting"]: trace
        for trace in figure.data
        if trace.mode == "markers" and trace.marker.symbol == "line-ew"
    }
    assert [trace.x[0] for trace in means.values()] == [0.1, 0.25, 1.0, 2.0]
    for index, trace in means.items():
        assert trace.y[0] == pytest.approx(findings.scores.mean(findings.settings[index])[0])
        if index in findings.comparisons:
            difference = findings.comparisons[index]
            assert trace.error_x.array is None
            assert trace.error_y.array[0] == pytest.approx(difference.high - difference.value)


def test_no_clipping_is_a_line_across_the_thresholds(seeded):
    findings, charts = seeded
    [unclipped] = [setting for setting in findings.settings if not setting.clips]
    [line] = of_setting(charts["metric-threshold"], unclipped.index)
    assert line.mode == "lines"
    assert set(line.y) == {findings.scores.mean(unclipped)[0]}
    assert colors_of(findings)[unclipped.index] == NEUTRAL


def test_a_setting_is_the_mean_of_its_seeds_within_their_band(seeded):
    findings, charts = seeded
    seeds = [run.of("eval/loss").values for run in findings.settings[0].runs]
    drawn = [t for t in of_setting(charts["eval-loss"], 0) if not t.meta.get("seed")]
    band, mean = drawn
    assert band.fill == "toself"
    assert mean.y == pytest.approx(np.mean(seeds, axis=0), rel=1e-6)
    around = [*np.max(seeds, axis=0), *np.min(seeds, axis=0)[::-1]]
    assert band.y == pytest.approx(around, rel=1e-6)


def test_single_seeds_are_there_on_demand(seeded):
    _, charts = seeded
    demanded = [trace for trace in charts["loss"].data if (trace.meta or {}).get("seed")]
    assert len(demanded) == 15


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Rows of a long run with one spike, and their charts."""
    lines = rows(steps=5000, seed=1)
    lines[3210]["grad/norm"] = 1e6
    folder = write_run(tmp_path_factory.mktemp("charts") / "run", lines, config())
    return lines, figures(folder)


def test_a_single_run_begins_with_what_clipping_did(long_run):
    _, charts = long_run
    expected = ["norm", "clipped", "coef", "histogram", "eval-loss", "eval-accuracy", "loss"]
    assert list(charts) == expected


def test_a_spike_of_a_long_run_is_in_the_thinned_curve(long_run):
    _, charts = long_run
    raw, *_ = charts["norm"].data
    assert len(raw.x) < 1000
    assert dict(zip(raw.x, raw.y, strict=True))[3211] == 1e6


def test_the_bold_curve_is_the_geometric_mean_of_a_twentieth_of_the_run(long_run):
    lines, charts = long_run
    _, mean, *_ = charts["norm"].data
    logs = np.log([row["grad/norm"] for row in lines])
    position = int(np.argmin(np.abs(mean.x - 1500)))
    step = int(mean.x[position])
    around = logs[step - 125 : step + 125].mean()
    assert math.log(mean.y[position]) == pytest.approx(around, abs=0.02)


def test_a_short_series_is_drawn_whole(long_run):
    lines, charts = long_run
    losses = [row["eval/loss"] for row in lines if "eval/loss" in row]
    assert charts["eval-loss"].data[0].y == pytest.approx(losses, rel=1e-6)


def test_no_accuracy_is_cut_off_by_its_axis(tmp_path):
    lines = rows(steps=100)
    for row, accuracy in zip(lines[9::10], (0.1, 0.5, *np.linspace(0.9, 0.93, 8)), strict=True):
        row["eval/accuracy"] = float(accuracy)
    axis = figures(write_run(tmp_path / "run", lines, config()))["eval-accuracy"].layout.yaxis
    low, high = axis.range
    assert low < 0.1
    assert high > 0.93


def test_shares_have_no_logarithm(charts):
    for key in ("clipped", "coef"):
        assert list(charts[key].layout.meta["scales"]) == ["linear"], key


@pytest.mark.parametrize("norm", [math.nan, 0.0])
def test_a_run_that_is_lost_from_its_first_row_is_drawn(norm, tmp_path):
    lines = rows("none", None, 30, evaluations=0)
    for row in lines:
        row |= {"train/loss": math.nan, "grad/norm": norm, "grad/norm_clipped": norm}
    assert figures(write_run(tmp_path / "run", lines, config(), state="failed", error="lost"))


def test_a_run_that_diverged_does_not_flatten_other_curves(tmp_path):
    charts = figures(troubled(tmp_path / "s"))
    for key, highest in (("loss", 12), ("norm", 100)):
        axis = charts[key].layout.yaxis
        assert (10 ** axis.range[1] if axis.type == "log" else axis.range[1]) < highest, key


def test_steps_that_were_skipped_are_marked_with_their_reason(tmp_path):
    lines = rows(steps=50)
    for number, row in enumerate(lines, start=1):
        row |= {"clip/skipped": int(number >= 20), "grad/nonfinite": int(number >= 30)}
    figure = figures(write_run(tmp_path / "run", lines, config()))["norm"]
    [marks] = [trace for trace in figure.data if "skipped" in (trace.name or "")]
    assert list(marks.x) == [20, 30]
    assert "spike" in marks.hovertext[0]
    assert "not finite" in marks.hovertext[1]


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    """The map of two thresholds and two learning rates; one setting diverged."""
    losses = {(0.25, 0.1): [0.3, 0.4], (1.0, 0.1): [0.2, 0.25], (0.25, 0.4): [0.5, 0.6]}
    losses[1.0, 0.4] = [math.nan, math.nan]
    return figures(trained(tmp_path_factory.mktemp("charts"), losses))["metric-map"]


def test_two_numbers_have_a_map_of_means(rates):
    cells, labels = rates.data
    assert list(rates.layout.xaxis.ticktext) == ["0.25", "1.0"]
    assert list(rates.layout.yaxis.ticktext) == ["0.1", "0.4"]
    # From the lowest mean, 0.225, to the highest one, 0.55
    places = [[0.125 / 0.325, 0.0], [1.0, math.nan]]
    assert np.asarray(cells.z) == pytest.approx(np.array(places), abs=1e-6, nan_ok=True)
    texts = dict(zip(zip(labels.x, labels.y, strict=True), labels.text, strict=True))
    assert texts == {(0, 0): "0.35", (1, 0): "0.225", (0, 1): "0.55"}


def test_maps_share_one_scale_of_colours():
    charts = [
        heat.draw(
            name="map",
            title="",
            note="",
            axes=("x", "y"),
            xs=["1", "2"],
            ys=["1"],
            cells=[
                heat.Cell(Entry(0, "", "#000000"), "1", "1", low, True, ""),
                heat.Cell(Entry(1, "", "#000000"), "2", "1", 0.4, True, ""),
            ],
            all_means=[0.2, 0.3, 0.4],
            limits_marked=False,
            lower_is_better=True,
        )
        for low in (0.2, 0.3)
    ]
    shown = [np.asarray(chart.figure.data[0].z).tolist() for chart in charts]
    assert shown == [[[0.0, 1.0]], [pytest.approx([0.5, 1.0], abs=1e-6)]]


def test_texts_of_a_map_are_read_on_every_colour_of_its_scale():
    for place in np.linspace(0, 1, 101):
        color = viridis(place)
        red, green, blue = map(int, heat.readable(color)[4:-1].split(","))
        assert contrast(color, f"#{red:02x}{green:02x}{blue:02x}") >= 4.5, place


def test_a_cell_that_diverged_is_hatched(rates):
    [hatched] = [shape for shape in rates.layout.shapes if shape.type == "path"]
    assert hatched.path.startswith(("M0.5", "M1."))


def test_the_highest_stable_rate_is_marked(rates):
    limits = [shape for shape in rates.layout.shapes if shape.type == "line"]
    # Above the second rate for the first threshold, above the first rate for the second one
    assert [round(line.y0 - 0.47) for line in limits] == [1, 0]


def test_a_run_that_diverged_has_a_mark_at_the_upper_edge(tmp_path):
    charts = figures(trained(tmp_path, {0.5: [0.1, 0.2], 1.0: [math.nan, 0.2]}))
    marks = [t for t in charts["metric-threshold"].data if t.yaxis == "y2" and t.meta]
    assert [mark.x[0] for mark in marks] == [1.0]


def test_each_choice_has_a_chart_of_its_thresholds(tmp_path):
    for number in range(4):
        threshold = (0.5, 1.0)[number % 2]
        lines = rows("norm", threshold, 20, seed=number)
        settings = config(clip__threshold=threshold, plugin={"name": ("ddp", "fsdp")[number // 2]})
        words = (f"plugin={settings['plugin']['name']}", f"clip.threshold={threshold}")
        write_run(tmp_path / str(number), lines, settings, overrides=words)
    metric = [key for key in figures(tmp_path) if key.startswith("metric")]
    assert metric == ["metric-threshold-plugin-ddp", "metric-threshold-plugin-fsdp"]


def test_a_branch_begins_with_the_run_it_was_branched_from(tmp_path):
    whole = rows(steps=100, seed=1)
    write_run(tmp_path / "parent", whole, config())
    for number, threshold in enumerate((0.1, 1.0)):
        settings = config(clip__threshold=threshold)
        settings["resume"] = {"from": str(tmp_path / "parent@60")}
        branch = rows("norm", threshold, 100, seed=5)[60:]
        write_run(tmp_path / "s" / str(number), branch, settings, overrides=("clip=norm",))
    figure = figures(tmp_path / "s")["eval-loss"]
    [curve] = of_setting(figure, 0)
    before = [row["eval/loss"] for row in whole[:60] if "eval/loss" in row]
    assert curve.y[: len(before)] == pytest.approx(before, rel=1e-6)
    [join] = [trace for trace in figure.data if (trace.meta or {}).get("join")]
    assert set(join.x) == {60}
    assert 0 < figure.layout.xaxis.range[0] < 60


def test_the_colours_of_charts_are_told_from_both_backgrounds():
    dark = on_dark()
    lines = [*HUES, NEUTRAL, *ordered(40), *ordered(1)]
    for color in lines:
        assert contrast(color, "#ffffff") >= 3, color
        assert contrast(dark.get(color, color), dark["#ffffff"]) >= 3, color


def test_texts_of_the_page_are_read_on_both_backgrounds():
    style = resources.files("runner.report").joinpath("page.css").read_text()
    for scheme in style.split(":root {")[1:3]:
        names = dict(
            part.split(": ") for part in scheme.partition("}")[0].split(";") if ": " in part
        )
        color = {name.strip().removeprefix("--"): value.strip() for name, value in names.items()}
        paper = {"#fff": "#ffffff"}.get(color["paper"], color["paper"])
        for name in ("ink", "soft", "mark", "bad", "good"):
            assert contrast(color[name], paper) >= 4.5, name
            assert contrast(color[name], color["wash"]) >= 4.5, name
        assert contrast(color["edge"], paper) >= 3


@pytest.mark.parametrize("count", range(2, 9))
def test_colours_of_neighbouring_thresholds_are_told_apart(count):
    colors = ordered(count)
    for theme in ({}, on_dark()):
        shown = [lab(theme.get(color, color)) for color in colors]
        for first, second in pairwise(shown):
            assert math.dist(first, second) > 14, (colors, theme)


def lab(color):
    """CIE L*, a* and b* of a colour, in which distances are about those that the eye sees."""
    channels = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(to_xyz @ linear / np.array([0.9505, 1.0, 1.089])).tolist()
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(first, second):
    """The ratio of WCAG 2."""

    def luminance(color):
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_a_page_has_the_axes_that_its_rows_allow(tmp_path):
    lines = rows(steps=40)
    for number, row in enumerate(lines, start=1):
        row |= {"train/samples": 32 * number, "time/step_s": 0.5}
    folder = write_run(tmp_path / "run", lines, config())
    page = write(folder).read_text()
    text = page.partition('id="look">')[2].partition("</script>")[0]
    axes = json.loads(text)["axes"]["0"]
    assert axes["samples"][1][-1] == 32 * 40
    assert axes["seconds"][1][-1] == pytest.approx(20.0)
    assert "tokens" not in axes
