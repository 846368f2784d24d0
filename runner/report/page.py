"""Write the page: one file that holds everything it needs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.report.compared import baselines
from runner.report.findings import Findings, find
from runner.report.groups import Group
from runner.report.markup import Child, Markup, join, tag
from runner.report.notation import plural
from runner.report.origin import origin
from runner.report.palette import on_dark
from runner.report.run import unreadable
from runner.report.sweep import SweepRuns, read
from runner.report.table import omitted, table
from runner.report.thin import SMOOTHING
from runner.report.verdict import remarks, verdict
from runner.run_folder import files
from runner.run_folder.strict_json import write_text

if TYPE_CHECKING:
    from runner.report.plotting import Chart

# Above so many settings the key to the colours is folded.
_KEYS_SHOWN = 24


def write(folder: Path, left: int = 0, baseline: str | None = None) -> Path:
    """Write ``report.html`` into a run folder, or into a sweep folder of any number of runs."""
    return write_page(replace(read(folder), baseline=baseline), left)


def write_page(sweep: SweepRuns, left: int = 0) -> Path:
    """Write the page of runs that were read before, see :func:`write`."""
    try:
        page = html(sweep, left)
    except Exception:  # one run that cannot be shown must not take the page of the others
        page = html(_readable(sweep), left)
    target = sweep.folder / files.PAGE
    # An override may hold bytes that are no UTF-8; the page shows a question mark for each.
    write_text(target, page.encode("utf-8", "replace").decode("utf-8"))
    return target


def html(sweep: SweepRuns, left: int = 0) -> str:
    """Return the page of a sweep or a run; for ``left`` see :func:`write`."""
    found = find(sweep)
    scripts = [_asset("plotly/plotly-cartesian.min.js"), _asset("page.js")]
    kind = "Run" if sweep.single else f"Sweep · {plural(len(sweep.runs), 'run')}"
    body = tag(
        "body",
        tag("header", tag("p", kind, class_="aside"), tag("h1", sweep.name), _going(left)),
        tag("main", *_sections(found)),
        _data(on_dark(), id="dark"),
        *(Markup(f"<script>{script}</script>") for script in scripts),
    )
    swatches = "".join(f"--g{group.index}:{group.color};" for group in found.groups)
    dark = "".join(f"--g{g.index}:{on_dark()[g.color]};" for g in found.groups)
    style = f":root{{{swatches}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{sweep.name} · report"),
        # Browsers request an icon if the page has none.
        tag("link", rel="icon", href="data:,"),
        Markup(f"<style>{style}{_asset('page.css')}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _readable(sweep: SweepRuns) -> SweepRuns:
    """Return a sweep with an empty run in place of each that alone cannot be shown."""
    runs = []
    for run in sweep.runs:
        try:
            html(replace(sweep, runs=(run,)))
            runs.append(run)
        except Exception as error:
            runs.append(unreadable(run.folder, run.number, error))
    return replace(sweep, runs=tuple(runs))


def _sections(found: Findings) -> list[Child]:
    # Importing plotly takes a fifth of a second, which readers of folders need not spend.
    from runner.report.charts import sections

    drawn = sections(found)
    return [
        tag(
            "section",
            tag("p", verdict(found), id="verdict"),
            tag("ul", *(tag("li", note) for note in remarks(found)), id="remarks"),
            table(found) if found.sweep.runs else None,
            _data(baselines(found), id="baselines"),
            omitted(found),
        ),
        tag("noscript", tag("p", "The charts need scripts, which are turned off here.")),
        tag("div", _controls(found.groups), *starmap(_charts, drawn), id="charts", hidden=True)
        if drawn
        else None,
        tag("section", tag("h2", "Origin"), origin(found.sweep), id="origin"),
    ]


def _charts(title: str, charts: Sequence[Chart], note: str | None) -> Markup:
    return tag(
        "section",
        tag("h2", title),
        tag("div", *map(_chart, charts), class_="charts"),
        tag("p", note, class_="aside") if note else None,
    )


def _chart(chart: Chart) -> Markup:
    scales = chart.figure.layout.meta.get("scales", {})
    help_ = "Left and right read values, + and - zoom, 0 resets."
    return tag(
        "figure",
        tag("h3", chart.title),
        tag("button", "log y", type="button", class_="log", title="Logarithmic vertical axis (L)")
        if len(scales) > 1
        else None,
        tag("div", class_="plot", tabindex=0, role="group", aria_label=f"{chart.title}. {help_}"),
        tag("p", class_="reading", aria_live="polite"),
        tag("figcaption", chart.note),
        _data(chart.figure),
        id=f"chart-{chart.key}",
        data_chart=chart.key,
    )


def _data(of: Any, **attributes: str) -> Markup:
    """Return JSON in an element that no browser runs, whatever text is in it."""
    text = of.to_json() if hasattr(of, "to_json") else json.dumps(of)
    return tag(
        "script", Markup(text.replace("<", "\\u003c")), type="application/json", **attributes
    )


def _controls(groups: Sequence[Group]) -> Markup:
    """Return what changes all charts: the settings, which a press hides, and smoothing."""
    names = [
        tag(
            "button",
            tag("i", style=f"border-top-color:var(--g{group.index})", data_dash=group.dash),
            group.label,
            type="button",
            aria_pressed="true",
            data_group=group.index,
        )
        for group in groups
    ]
    inner = tag("div", *names, class_="names", role="group", aria_label="Show settings")
    if len(groups) > _KEYS_SHOWN:
        inner = tag("details", tag("summary", f"Colours of {len(groups)} settings"), inner)
    slider = tag("input", id="smoothing", type="range", min=0, max=30, value=f"{100 * SMOOTHING:g}")
    smoothing = tag("label", "Smoothing ", slider, tag("output", f"{100 * SMOOTHING:g} %"))
    button = tag("button", "Show all runs", type="button")
    selected = tag("section", tag("h2"), button, tag("div"), id="selected", hidden=True)
    shown = inner if len(groups) > 1 else None
    return join([tag("nav", shown, smoothing, id="key", aria_label="Charts"), selected])


def _going(left: int) -> Markup | None:
    """Return a note on a sweep that is still running."""
    if not left:
        return None
    note = (
        f"The sweep was still running when this page was written, with {plural(left, 'run')} left. "
        "The page is written again as runs end: reload it."
    )
    return tag("p", note, id="going", role="status")


def _policy(scripts: Sequence[str]) -> str:
    """Return a policy that allows the page its own scripts, style and pictures only."""
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    named = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {named}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return resources.files("runner.report").joinpath(name).read_text(encoding="utf-8")
