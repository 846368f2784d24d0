"""``python -m runner report FOLDER`` and ``dashboard``: write the page, save a wandb workspace."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from runner.cli import FAILED, WRONG_REQUEST, command_parser
from runner.config.folders import find
from runner.config.notation import first_few
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean
from runner.report import FORMATS, NoRunError, findings, read
from runner.report.page import write_page
from runner.run_folder.strict_json import write_text
from runner.telemetry.sinks.console import print_line

_BASELINE = "report.baseline"
_SECONDS = 20.0  # seconds after which the process that asks wandb's server is killed


def report(words: Sequence[str]) -> int:
    """Write report.html, one page, for a run or for a sweep."""
    parser = command_parser(report)
    add = parser.add_argument
    add("folder", type=Path, help="folder of a run, or of a sweep")
    about = "compare the other settings with this one: its name in the table, or one of its runs"
    add("overrides", nargs="*", metavar=f"{_BASELINE}=NAME", help=about)
    add("--open", action="store_true", help="show it in the browser too")
    for kind, (name, _) in FORMATS.items():
        add(f"--{kind}", action="store_true", help=f"also write {name}")
    asked = parser.parse_intermixed_args(words)
    baseline = None
    for word in asked.overrides:
        key, _, baseline = word.partition("=")
        if key != _BASELINE or not baseline:
            message = f"the page takes {_BASELINE}=NAME alone{did_you_mean(key, [_BASELINE])}"
            raise RequestError([Problem(key, baseline or NOTHING, message)])
    try:
        sweep = replace(read(asked.folder), baseline=baseline)
    except NoRunError as error:
        print(error, file=sys.stderr)
        return WRONG_REQUEST
    found = findings.find(sweep)
    if baseline and found.unknown is not None:
        labels = [group.label for group in found.groups]
        message = f"names no setting of {sweep.name}{did_you_mean(baseline, labels)}"
        message += f"  (settings: {first_few(labels, 8)})"
        raise RequestError([Problem(_BASELINE, baseline, message)])
    page = write_page(sweep)
    print(page)
    for name, text in (one for kind, one in FORMATS.items() if getattr(asked, kind)):
        write_text(sweep.folder / name, text(found).encode("utf-8", "replace").decode())
        print(sweep.folder / name)
    if asked.open and not webbrowser.open(page.as_uri()):
        print("no browser here; open the file above in one", file=sys.stderr)
    return 0


def dashboard(words: Sequence[str]) -> int:
    """Save a wandb workspace with the charts of report.html, and print its URL.

    This needs a wandb server and its API key (wandb login).
    """
    tracker = (find("conf") / "tracker" / "wandb.yaml").read_text(encoding="utf-8")
    project, entity = yaml.safe_load(tracker)["project"], os.environ.get("WANDB_ENTITY", "")
    parser = command_parser(dashboard)
    add = parser.add_argument
    add("--project", default=str(project), help=f"show the runs of this project ({project})")
    add("--entity", default=entity, help="user or team that owns the project (of the API key)")
    add("--group", default="", help="show only this group: the name of a sweep")
    add("--name", default="", help="name of the workspace (Clipping, and the group)")
    asked = parser.parse_args(words)
    if importlib.util.find_spec("wandb_workspaces") is None:
        message = 'this needs wandb-workspaces: pip install -e ".[dashboard]" -c constraints.txt'
        print_line(f"clip-runner: {message}", sys.stderr)
        return WRONG_REQUEST
    said = "wandb is told to be offline (WANDB_MODE)"
    if os.environ.get("WANDB_MODE", "online") == "online":
        # A process of its own asks the server: wandb's client waits for minutes, and ends with it.
        code = "from runner.tools.dashboard import main; main()"
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            done = subprocess.run(
                [*command, asked.project, asked.entity, asked.group, asked.name],
                # No reports to wandb's own servers, where nothing else is sent either.
                env={
                    **os.environ,
                    "WANDB_ERROR_REPORTING": "false",
                    "WANDB_HTTP_TIMEOUT": "6",  # seconds
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
            said = (done.stderr if done.returncode else done.stdout).strip().rpartition("\n")[2]
            if not done.returncode:
                print_line(f"workspace saved: {said}")
                return 0
        except subprocess.TimeoutExpired:
            said = f"no answer within {_SECONDS:g} seconds"
    print_line(f"clip-runner: the workspace was not saved: {said}", sys.stderr)
    return FAILED
