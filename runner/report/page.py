"""Write the page: one file that holds everything it needs. `page.html` is its layout."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from runner.report.findings import find
from runner.report.look import HUES, NEUTRAL, on_dark, plural
from runner.report.remarks import remarks
from runner.report.run import Run, SweepRuns, command_of, read
from runner.report.settings import choice
from runner.report.table import columns_of, facts_of, rows_of
from runner.report.verdict import verdict
from runner.run_folder import files
from runner.run_folder.strict_json import disk_full, write_text

log = logging.getLogger(__name__)

_FILES = (files.ROWS, files.SUMMARY, files.CONFIG, files.STATUS, files.LOG, files.PAGE)
# Recorded facts about the machine and the code, in the order they are shown.
_FACTS = ("git", "versions", "device", "world_size", "parameters", "host")


def written(folder: Path, left: int = 0) -> Path | None:
    """Write the page; None if that fails, which is logged."""
    try:
        return write(folder, left)
    except Exception as error:
        why = disk_full(error) or f"the page of {folder} could not be written: {error!r}"
        log.warning("%s", why)
        return None


def write(folder: Path, left: int = 0) -> Path:
    """Write ``report.html`` into a run folder, or into a sweep folder of any number of runs."""
    return write_page(read(folder), left)


def write_page(sweep: SweepRuns, left: int = 0) -> Path:
    """Write the page of runs that were read before, of which ``left`` have not ended."""
    # They import plotly, for which readers need not wait.
    from runner.report.sections import axes_of, colors_of, sections

    findings = find(sweep)
    colors = colors_of(findings)
    # Text of a configuration or an error is escaped wherever the template inserts it.
    pages = Environment(
        loader=PackageLoader("runner.report", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    pages.filters |= {"plural": plural, "inert": lambda text: text.replace("<", "\\u003c")}
    scripts = [_asset("plotly/plotly-cartesian.min.js"), _asset("page.js")]
    single = len(sweep.runs) == 1
    own_loop = all(run.own_loop for run in sweep.runs)
    html = pages.get_template("page.html").render(
        sweep=sweep,
        findings=findings,
        left=left,
        verdict=verdict(findings),
        remarks=remarks(findings),
        columns=columns_of(findings),
        rows=[] if single else rows_of(findings),
        table_facts=facts_of(findings) if single else [],
        charts=sections(findings),
        colors=colors,
        hues=HUES,
        greys=_greys(colors),
        axes=axes_of(findings),
        date=_date(sweep.runs),
        again="" if own_loop else command_of(["report", sweep.folder]),
        facts=_facts(sweep.runs),
        shared=_shared(sweep.runs),
        links=lambda run: _links(sweep, run),
        dark=on_dark(),
        style=_asset("page.css"),
        scripts=scripts,
        policy=_policy(scripts),
    )
    # An override may hold bytes that are no UTF-8; the page shows a question mark for each.
    write_text(sweep.folder / files.PAGE, html.encode("utf-8", "replace").decode("utf-8"))
    return sweep.folder / files.PAGE


def _greys(colors: Mapping[int, str]) -> list[int]:
    """Return the grey settings that get a hue when they are chosen; not a single one, as `none`."""
    greys = [index for index, color in colors.items() if color == NEUTRAL]
    return greys if len(greys) > 1 else []


def _date(runs: Sequence[Run]) -> str:
    """Return the day on which the first run began."""
    started = [str(run.status["started"]) for run in runs if run.status.get("started")]
    return min(started)[:10] if started else ""


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in scripts)
    named = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {named}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return resources.files("runner.report").joinpath(name).read_text(encoding="utf-8")


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    facts = {}
    for key in (*_FACTS, "started", "ended") if len(runs) == 1 else _FACTS:
        values = (run.status.get(key, run.summary.get(key)) for run in runs)
        texts = dict.fromkeys(str(value) for value in values if value not in (None, ""))
        if texts:
            facts[key.replace("_", " ")] = "; ".join(texts)
    return facts


def _shared(runs: Sequence[Run]) -> list[str]:
    """Return the configuration that all runs have in common."""
    configured = [run for run in runs if run.config]
    if not configured:
        return []
    shared = []
    for key, value in configured[0].config.items():
        if all(run.config.get(key, ...) == value for run in configured):
            shared.append(f"{key}={choice(configured[0], key)}")
    return shared


def _links(sweep: SweepRuns, run: Run) -> list[tuple[str, str]]:
    if run.folder is None:
        return []
    base = "" if sweep.single else f"{quote(run.folder.name)}/"
    names = [name for name in _FILES if not (sweep.single and name == files.PAGE)]
    return [(name, base + quote(name)) for name in names if (run.folder / name).exists()]
