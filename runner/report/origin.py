"""Show where the page comes from: commands, versions, and the files of the runs."""

from __future__ import annotations

from urllib.parse import quote

from runner.report.groups import choice
from runner.report.markup import Child, Markup, join, tag
from runner.report.run import Run
from runner.report.sweep import SweepRuns, command_of, from_here
from runner.run_folder import files

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
