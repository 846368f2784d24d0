"""``python -m runner dashboard``: save a wandb workspace, or write its specification."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from runner.cli import INTERRUPTED, WRONG_REQUEST
from runner.config.folders import find, outputs
from runner.dashboard import EXTRA
from runner.dashboard.saving import NotSavedError, WorkspaceRequest, save
from runner.run_folder import files
from runner.run_folder.atomic import write_text


def main(words: Sequence[str] | None = None) -> int:
    """Save the workspace to wandb if an API key is configured, else to a file; print where."""
    asked = _parser().parse_args(words)
    if importlib.util.find_spec(EXTRA) is None:
        return _refuse(
            "this needs wandb-workspaces, which the extra [dashboard] brings: "
            'pip install -e ".[dashboard]" -c constraints.txt'
        )
    # Error reports would go to wandb's own servers, also where nothing else is sent.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    from runner.dashboard import workspace

    name = asked.name or workspace.default_name(asked.group)
    if unfit := workspace.unfit(name):
        return _refuse(f"--name {name!r}: wandb takes no {' '.join(unfit)} in a name")
    try:
        return _publish(
            WorkspaceRequest(asked.entity, asked.project, name, asked.group), asked.output
        )
    except KeyboardInterrupt:
        return INTERRUPTED


def _publish(request: WorkspaceRequest, output: Path | None) -> int:
    """Save the workspace, or write its specification, or both where ``output`` is given."""
    from runner.telemetry.sinks.wandb_sink import effective_mode

    file = output or outputs() / "dashboard.json"
    if effective_mode("auto") != "online":
        why = f"wandb is offline here (no key, or told to be); the workspace is in {file}. "
        return _write(request, file, why + "To save it: wandb login, and this command again")
    try:
        print(f"workspace saved: {save(request)}")
    except NotSavedError as error:
        why = f"wandb did not take the workspace ({error}); it is in {file}"
        return _write(request, file, why, failed=True)
    return 0 if output is None else _write(request, file, f"its specification: {file}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runner dashboard",
        description=f"Save a wandb workspace with the charts of {files.PAGE}. If there is no "
        "API key, or the server refuses it, its specification is written to a file.",
        allow_abbrev=False,
    )
    project = _default_project()
    parser.add_argument(
        "--project", type=_text, default=project, help=f"show the runs of this project ({project})"
    )
    parser.add_argument(
        "--entity",
        type=_text,
        default=os.environ.get("WANDB_ENTITY") or None,
        help="user or team that owns the project (that of the API key)",
    )
    parser.add_argument("--group", type=_text, help="show only this group: the name of a sweep")
    parser.add_argument("--name", type=_text, help="name the workspace (Clipping, and the group)")
    parser.add_argument(
        "--output",
        type=_file,
        metavar="FILE",
        help="write the specification to this file, also if the workspace is saved "
        "(outputs/dashboard.json, if it is not)",
    )
    return parser


def _default_project() -> str:
    """Return the project that runs are filed under by default."""
    settings = yaml.safe_load((find("conf") / "tracker" / "wandb.yaml").read_text(encoding="utf-8"))
    return str(settings["project"])


def _text(word: str) -> str:
    if not word.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return word


def _file(word: str) -> Path:
    path = Path(word)
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file: {word!r} is not")
    return path


def _write(request: WorkspaceRequest, file: Path, message: str, failed: bool = False) -> int:
    """Write the specification and print the message, to standard error if saving failed."""
    from runner.dashboard import workspace

    built = workspace.build(request)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, workspace.specification(built))
    except OSError as error:
        return _refuse(f"the specification cannot be written to {file}: {error.strerror or error}")
    print(message, file=sys.stderr if failed else sys.stdout)
    return 0


def _refuse(message: str) -> int:
    print(f"clip-runner: {message}", file=sys.stderr)
    return WRONG_REQUEST
