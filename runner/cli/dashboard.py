"""``python -m runner dashboard``: save a wandb workspace with the charts of the page."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

import yaml

from runner.cli import FAILED, WRONG_REQUEST, command_parser
from runner.config.folders import find
from runner.telemetry.sinks.console import print_line

SECONDS = 20.0  # seconds after which the process that asks wandb's server is killed

SETTINGS = {"WANDB_ERROR_REPORTING": "false", "WANDB_HTTP_TIMEOUT": "6"}
"""No reports to wandb's own servers, where nothing else is sent either; seconds for a request."""

DESCRIPTION = """\
Save a wandb workspace with the charts of report.html. This needs a wandb server and its API key
(wandb login)."""


def main(words: Sequence[str]) -> int:
    """Save the workspace, and print its URL."""
    tracker = (find("conf") / "tracker" / "wandb.yaml").read_text(encoding="utf-8")
    project, entity = yaml.safe_load(tracker)["project"], os.environ.get("WANDB_ENTITY", "")
    parser = command_parser("dashboard", DESCRIPTION)
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
        code = "from runner.dashboard import main; main()"
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            done = subprocess.run(
                [*command, asked.project, asked.entity, asked.group, asked.name],
                env={**os.environ, **SETTINGS},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            said = (done.stderr if done.returncode else done.stdout).strip().rpartition("\n")[2]
            if not done.returncode:
                print_line(f"workspace saved: {said}")
                return 0
        except subprocess.TimeoutExpired:
            said = f"no answer within {SECONDS:g} seconds"
    print_line(f"clip-runner: the workspace was not saved: {said}", sys.stderr)
    return FAILED
