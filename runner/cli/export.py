"""``python -m runner export RUN``: write the weights of a run as one file for a plain model."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.cli import FAILED, command_parser
from runner.config.folders import Refusal, read_yaml
from runner.config.notation import higher_is_better, plural
from runner.config.problem import Problem, RequestError
from runner.run_folder import files
from runner.telemetry.sinks.console import print_line

DESCRIPTION = """\
Write the weights of a run as one file: the state dict of the whole model, whatever plugin trained
it, under the names of the plain model. `model.load_state_dict(safetensors.torch.load_file(FILE))`
loads it, or `torch.load(FILE)` with --format torch.

Exit codes: 0 written   1 the checkpoint is damaged, or the file cannot be written
2 there is no such checkpoint, or the file exists"""


def main(words: Sequence[str]) -> int:
    """Write the file and print its name."""
    parser = command_parser("export", DESCRIPTION)
    add_run(parser)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="file to write (RUN/model.safetensors)")
    add("--format", choices=("safetensors", "torch"), help="torch if FILE is .pt, .pth or .bin")
    add("--force", action="store_true", help="replace FILE if it exists")
    asked = parser.parse_args(words)
    run = folder_of_run(asked.run)
    suffix = asked.output.suffix if asked.output else ""
    form: Any = asked.format or ("torch" if suffix in (".pt", ".pth", ".bin") else "safetensors")
    file: Path = asked.output or run / ("model.pt" if form == "torch" else "model.safetensors")
    message = None
    if file.is_dir():
        message = "is a folder; name a file"
    elif not file.parent.is_dir():
        message = f"there is no folder {file.parent}"
    elif file.exists() and not asked.force:
        message = "exists; --force replaces it"
    if message is not None:
        raise RequestError([Problem("--output", str(file), message)])
    from runner.checkpoint.content import whole_model, write_model
    from runner.checkpoint.folder import DamagedCheckpoint

    try:
        checkpoint, manifest = chosen(run, asked.checkpoint)
        model = whole_model(checkpoint, manifest)
        keys = {"step": "step", "config": "config_hash"}
        about = {key: str(manifest[of]) for key, of in keys.items() if manifest.get(of) is not None}
        write_model(model, file, form, {"run": run.name, **about})
    except DamagedCheckpoint as error:
        print_line(f"clip-runner: {error}", sys.stderr)
        return FAILED
    except OSError as error:
        print_line(f"clip-runner: {file} cannot be written: {error}", sys.stderr)
        return FAILED
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    left_out = len(manifest.get("criterion", ()))
    without = f", without {plural(left_out, 'tensor')} of the criterion" if left_out else ""
    step = f", step {about['step']}" if "step" in about else ""
    print_line(f"{plural(len(model), 'tensor')}, {size}{step}, from {checkpoint}{without}\n{file}")
    return 0


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run and one of its checkpoints."""

    def which(word: str) -> str:
        if not re.fullmatch(rf"best|last|{files.FINAL}|\d{{1,15}}", word):
            message = f"must be a number of optimizer steps, best, last or {files.FINAL}: {word!r}"
            raise argparse.ArgumentTypeError(message)
        return word

    about = "checkpoint (final, or last if the run has no final weights)"
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--checkpoint", type=which, metavar="STEP|best|last|final", help=about)


def folder_of_run(given: Path) -> Path:
    """Return the absolute path of a run's folder."""
    if not given.is_dir():
        raise RequestError([Problem("RUN", str(given), "there is no such folder")])
    if (given / files.SWEEP).exists():
        message = f"is a sweep; name one of its runs, such as {given / '0'}"
        raise RequestError([Problem("RUN", str(given), message)])
    return given.absolute()


def chosen(run: Path, name: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a whole checkpoint of a run and its manifest, see :func:`folder.choose`."""
    from runner.checkpoint.folder import NoCheckpoint, choose

    objective, maximizes = "", False
    try:
        if name == "best":
            section = read_yaml(run / files.CONFIG)["sweep"]
            objective, direction = str(section["objective"]), section["direction"]
            maximizes = direction == "maximize" if direction else higher_is_better(objective)
        return choose(run, name, objective, maximizes)
    except (Refusal, KeyError, TypeError):
        message = f"needs sweep.objective, which {run / files.CONFIG} lacks"
        raise RequestError([Problem("--checkpoint", "best", message)]) from None
    except NoCheckpoint as error:
        raise RequestError([Problem("RUN", str(run), str(error))]) from None
