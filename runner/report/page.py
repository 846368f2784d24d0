"""Write the page: one file that holds everything it needs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from runner.report.curves import clip_charts, loss_charts, norm_charts
from runner.report.findings import Findings, find
from runner.report.groups import Group
from runner.report.heat import heat_maps
from runner.report.markup import Child, Markup, tag
from runner.report.norms import histogram
from runner.report.notation import plural
from runner.report.origin import origin
from runner.report.predicted import ratio_charts
from runner.report.run import unreadable
from runner.report.sweep import SweepRuns, read
from runner.report.table import omitted, table
from runner.report.threshold import metric_charts
from runner.report.verdict import remarks, verdict
from runner.run_folder import files
from runner.run_folder.atomic import write_text

# Above so many settings the key to the colours is folded.
_KEYS_SHOWN = 24


def write(folder: Path, left: int = 0) -> Path:
    """Write ``report.html`` into a run folder, or into a sweep folder of any number of runs.

    Args:
        folder: folder of a run, which has ``status.json``, or of a sweep, which has numbered
            folders or ``sweep.json``.
        left: number of runs that a sweep that is still running has yet to finish.

    Returns:
        The file, which is replaced as a whole.

    Raises:
        runner.report.NoRunError: the folder is missing, or is neither.
        OSError: the page cannot be written there.
    """
    sweep = read(folder)
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
    kind = "Run" if sweep.single else f"Sweep · {plural(len(sweep.runs), 'run')}"
    body = tag(
        "body",
        tag("header", tag("p", kind, class_="aside"), tag("h1", sweep.name), _going(left)),
        tag("main", *_sections(found)),
        Markup(f"<script>{_asset('page.js')}</script>"),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{sweep.name} · report"),
        # Browsers request an icon if the page has none.
        tag("link", rel="icon", href="data:,"),
        Markup(f"<style>{_asset('page.css')}</style>"),
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
    maps, left = heat_maps(found)
    return [
        tag(
            "section",
            tag("p", verdict(found), id="verdict"),
            tag("ul", *(tag("li", note) for note in remarks(found)), id="remarks"),
            table(found) if found.sweep.runs else None,
            omitted(found),
        ),
        _key(found.groups),
        _charts("Metric against threshold", metric_charts(found)),
        _charts("Loss", loss_charts(found.groups)),
        _charts("Gradient norm", norm_charts(found.groups)),
        _charts("What clipping did", clip_charts(found.groups)),
        _charts("Choosing a threshold", [histogram(found), *ratio_charts(found)]),
        _charts("By parameter", maps, left),
        tag("section", tag("h2", "Origin"), origin(found.sweep), id="origin"),
    ]


def _charts(title: str, charts: Sequence[Child], note: str | None = None) -> Markup | None:
    if not any(charts):
        return None
    return tag(
        "section",
        tag("h2", title),
        tag("div", *charts, class_="charts"),
        tag("p", note, class_="aside") if note else None,
    )


def _key(groups: Sequence[Group]) -> Markup | None:
    """Return the key to the colours; with scripts, each name hides and shows its curves."""
    if len(groups) < 2:
        return None
    names = [
        tag(
            "button",
            _stroke(group),
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
    return tag("nav", inner, id="key", aria_label="Settings")


def _stroke(group: Group) -> Markup:
    line = tag(
        "line", x1=0, x2=22, y1=5, y2=5, stroke=group.color, stroke_dasharray=group.dash or None
    )
    return tag("svg", line, viewBox="0 0 22 10", class_="stroke", aria_hidden="true")


def _going(left: int) -> Markup | None:
    """Return a note on a sweep that is still running."""
    if not left:
        return None
    note = (
        f"The sweep was still running when this page was written, with {plural(left, 'run')} left. "
        "The page is written again as runs end: reload it."
    )
    return tag("p", note, id="going", role="status")


def _policy() -> str:
    """Return a policy that allows the page its own script, style and pictures only.

    The script is named by its hash, so that no other text could run as one even if it were not
    escaped.
    """
    digest = base64.b64encode(hashlib.sha256(_asset("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return resources.files("runner.report").joinpath(name).read_text(encoding="utf-8")
