"""Show where the page comes from: commands, versions, and the files of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from runner.config.problem import shown
from runner.report.groups import choice
from runner.report.markup import Child, Markup, join, tag
from runner.report.run import Run
from runner.report.sweep import SweepRuns, command_of
from runner.run_folder import files

_FILES = (files.ROWS, files.SUMMARY, files.CONFIG, files.STATUS, files.LOG, files.PAGE)
# Recorded facts about the machine and the code, in the order they are shown.
_FACTS = ("git", "versions", "python", "torch", "device", "world_size", "parameters", "host")


def origin(sweep: SweepRuns) -> Markup:
    """Return commands, versions, the shared configuration, and links to the files."""
    return join(
        [
            _commands(sweep),
            _facts(sweep.runs),
            _shared(sweep.runs),
            _runs(sweep) if sweep.runs else None,
        ]
    )


def _commands(sweep: SweepRuns) -> Markup:
    again = command_of(["report", _path(sweep.folder)])
    return join(
        [
            tag("p", "Made by"),
            tag("pre", sweep.command) if sweep.command else tag("p", "a command not recorded."),
            tag("p", "This page again"),
            tag("pre", again),
        ]
    )


def _path(folder: Path) -> str:
    """Return the path of a folder, relative to the working directory if it lies in it."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def _facts(runs: tuple[Run, ...]) -> Markup | None:
    """Return each fact with all values that runs recorded; usually there is one."""
    facts: dict[str, dict[str, None]] = {}
    for run in runs:
        for key in _FACTS:
            value = run.status.get(key, run.summary.get(key))
            if value is not None and value != "":
                facts.setdefault(key, {})[_plain(value)] = None
        for key in ("started", "ended"):
            value = run.status.get(key)
            if len(runs) == 1 and value:
                facts[key] = {str(value): None}
    if not facts:
        return None
    return tag(
        "dl",
        *(
            part
            for key, values in facts.items()
            for part in (tag("dt", key.replace("_", " ")), tag("dd", "; ".join(values)))
        ),
    )


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return shown(value) if not isinstance(value, list) else json.dumps(value, default=str)


def _shared(runs: tuple[Run, ...]) -> Markup | None:
    """Return the configuration keys with the same value in all runs."""
    known = [run for run in runs if run.config]
    if not known:
        return None
    first = known[0].config
    same = [
        key
        for key in first
        if all(key in run.config and run.config[key] == first[key] for run in known[1:])
    ]
    lines = "\n".join(f"{key}={choice(known[0], key)}" for key in same)
    title = "Configuration" if len(known) == 1 else "Configuration that all runs share"
    return tag("details", tag("summary", f"{title} ({len(same)} keys)"), tag("pre", lines))


def _runs(sweep: SweepRuns) -> Markup:
    rows = [_run(sweep, run) for run in sweep.runs]
    listing = tag(
        "table",
        tag("caption", "The files of each run, relative to this page.", class_="aside"),
        tag(
            "thead",
            tag(
                "tr",
                *(tag("th", name, scope="col") for name in ("run", "command, error", "files")),
            ),
        ),
        tag("tbody", *rows),
        id="files",
    )
    several = len(sweep.runs) > 1
    inner = tag("div", listing, class_="wide", tabindex=0, role="region", aria_label="Files")
    return tag("details", tag("summary", "Runs, their commands and files"), inner, open=not several)


def _run(sweep: SweepRuns, run: Run) -> Markup:
    command = command_of(run.overrides)
    hash_ = run.status.get("config_hash")
    tracked = run.status.get("wandb_run_id")
    facts = [f"config {hash_}" if hash_ else "", f"wandb {tracked}" if tracked else ""]
    return tag(
        "tr",
        tag("th", run.number, scope="row"),
        tag(
            "td",
            tag("code", command),
            tag("div", " · ".join(fact for fact in facts if fact), class_="aside"),
            tag("pre", run.error, class_="error") if run.error else None,
        ),
        tag("td", *_links(sweep, run)),
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
