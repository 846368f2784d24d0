"""``python -m runner dashboard``: save a wandb workspace with the charts of the page."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

import yaml

from runner.cli import FAILED, WRONG_REQUEST
from runner.config.folders import find
from runner.run_folder import files
from runner.telemetry.sinks.console import print_line

SECONDS = 20.0
"""Seconds after which the process that asks wandb's server is killed."""

REQUEST_SECONDS = "6"
"""Seconds for one request, so that wandb reports the error itself."""


def main(words: Sequence[str]) -> int:
    """Save the workspace, and print its URL."""
    asked = _parser().parse_args(words)
    if importlib.util.find_spec("wandb_workspaces") is None:
        message = 'this needs wandb-workspaces: pip install -e ".[dashboard]" -c constraints.txt'
        print_line(f"clip-runner: {message}", sys.stderr)
        return WRONG_REQUEST
    message = "wandb is told to be offline (WANDB_MODE)"
    if os.environ.get("WANDB_MODE", "online") == "online":
        url, message = _saved([asked.project, asked.entity, asked.group, asked.name])
        if url:
            print_line(f"workspace saved: {url}")
            return 0
    print_line(f"clip-runner: the workspace was not saved: {message}", sys.stderr)
    return FAILED


def _saved(words: Sequence[str]) -> tuple[str, str]:
    """Return the URL of the saved workspace, or why it was not saved.

    A process of its own asks the server: wandb's client waits for minutes, and ends with it.
    """
    # Error reports would go to wandb's own servers, also where nothing else is sent.
    settings = {"WANDB_ERROR_REPORTING": "false", "WANDB_HTTP_TIMEOUT": REQUEST_SECONDS}
    command = [sys.executable, "-W", "ignore", "-m", "runner.dashboard.workspace", *words]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {SECONDS:g} seconds"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [""]
    return ("", lines[-1]) if done.returncode else (lines[-1], "")


def _parser() -> argparse.ArgumentParser:
    tracker = (find("conf") / "tracker" / "wandb.yaml").read_text(encoding="utf-8")
    project = str(yaml.safe_load(tracker)["project"])
    parser = argparse.ArgumentParser(
        prog="python -m runner dashboard",
        description=f"Save a wandb workspace with the charts of {files.PAGE}. This needs a wandb "
        "server and its API key (wandb login).",
        allow_abbrev=False,
    )
    for flag, default, about in (
        ("--project", project, f"show the runs of this project ({project})"),
        ("--entity", os.environ.get("WANDB_ENTITY", ""), "owner of the project (of the API key)"),
        ("--group", "", "show only this group: the name of a sweep"),
        ("--name", "", "name of the workspace (Clipping, and the group)"),
    ):
        parser.add_argument(flag, default=default, help=about)
    return parser
