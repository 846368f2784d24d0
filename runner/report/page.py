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
from urllib.parse import quote

from runner.report.findings import Findings, Group, choice, find
from runner.report.look import SMOOTHING, Child, Markup, join, on_dark, plural, tag
from runner.report.run import Run
from runner.report.sweep import SweepRuns, command_of, from_here, read
from runner.report.table import baselines, omitted, table
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
    target = sweep.folder / files.PAGE
    # An override may hold bytes that are no UTF-8; the page shows a question mark for each.
    write_text(target, html(sweep, left).encode("utf-8", "replace").decode("utf-8"))
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


_FILES = (files.ROWS, files.SUMMARY, files.CONFIG, files.STATUS, files.LOG, files.PAGE)
# Recorded facts about the machine and the code, in the order they are shown.
_FACTS = ("git", "versions", "device", "world_size", "parameters", "host")


def origin(sweep: SweepRuns) -> Markup:
    """Return commands, versions, the shared configuration, and links to the files."""
    return join(
        [
            tag("p", "Made by"),
            tag("pre", sweep.command) if sweep.command else tag("p", "a command not recorded."),
            tag("p", "This page again"),
            tag("pre", command_of(["report", from_here(sweep.folder)])),
            _facts(sweep.runs),
            _shared(sweep.runs),
            _runs(sweep) if sweep.runs else None,
        ]
    )


def _facts(runs: tuple[Run, ...]) -> Markup | None:
    """Return each fact with all values that runs recorded; usually there is one."""
    parts: list[Markup] = []
    for key in (*_FACTS, "started", "ended") if len(runs) == 1 else _FACTS:
        values = (run.status.get(key, run.summary.get(key)) for run in runs)
        known = dict.fromkeys(str(value) for value in values if value not in (None, ""))
        if known:
            parts += [tag("dt", key.replace("_", " ")), tag("dd", "; ".join(known))]
    return tag("dl", *parts) if parts else None


def _shared(runs: tuple[Run, ...]) -> Markup | None:
    """Return the configuration keys with the same value in all runs."""
    known = [run for run in runs if run.config]
    if not known:
        return None
    first, *others = (run.config for run in known)
    same = [k for k in first if all(k in one and one[k] == first[k] for one in others)]
    lines = "\n".join(f"{key}={choice(known[0], key)}" for key in same)
    title = "Configuration" if len(known) == 1 else "Configuration that all runs share"
    return tag("details", tag("summary", f"{title} ({len(same)} keys)"), tag("pre", lines))


def _runs(sweep: SweepRuns) -> Markup:
    """Return a table of the runs with their commands, errors and files."""
    headings = [tag("th", name, scope="col") for name in ("run", "command, error", "files")]
    caption = tag("caption", "The files of each run, relative to this page.", class_="aside")
    body = tag("tbody", *(_run(sweep, run) for run in sweep.runs))
    listing = tag("table", caption, tag("thead", tag("tr", *headings)), body, id="files")
    inner = tag("div", listing, class_="wide", tabindex=0, role="region", aria_label="Files")
    title = tag("summary", "Runs, their commands and files")
    return tag("details", title, inner, open=len(sweep.runs) < 2)


def _run(sweep: SweepRuns, run: Run) -> Markup:
    hash_ = run.status.get("config_hash")
    tracked = run.status.get("wandb_run_id")
    facts = [f"config {hash_}" if hash_ else "", f"wandb {tracked}" if tracked else ""]
    return tag(
        "tr",
        tag("th", run.number, scope="row"),
        tag(
            "td",
            tag("code", sweep.command_of(run)),
            tag("div", " · ".join(fact for fact in facts if fact), class_="aside"),
            tag("pre", run.error, class_="error") if run.error else None,
        ),
        tag("td", *_links(sweep, run)),
        id=f"run-{run.number}",
    )


def _links(sweep: SweepRuns, run: Run) -> list[Child]:
    if run.folder is None:
        return ["never started"]
    base = "" if sweep.single else f"{quote(run.folder.name)}/"
    links: list[Child] = []
    for name in _FILES:
        # The page of a run does not link to itself.
        if (run.folder / name).exists() and not (sweep.single and name == files.PAGE):
            links += [tag("a", name, href=base + quote(name)), " "]
    return links
