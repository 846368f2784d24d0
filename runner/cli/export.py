"""``python -m runner export RUN``: write the weights of a run as one file for a plain model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.cli import command_parser
from runner.config.folders import Refusal, read_yaml
from runner.config.notation import higher_is_better, plural
from runner.config.problem import Problem, RequestError
from runner.run_folder import files
from runner.telemetry.sinks.console import print_line

DESCRIPTION = """\
Write the weights of a run as one file: the state dict of the whole model, whatever plugin trained
it, under the names of the plain model. `model.load_state_dict(safetensors.torch.load_file(FILE))`
loads it, or `torch.load(FILE)` if FILE ends in .pt, .pth or .bin.

Exit codes: 0 written   1 the checkpoint is damaged, or the file cannot be written
2 there is no such checkpoint, or the file exists"""


def main(words: Sequence[str]) -> int:
    """Write the file and print its name."""
    parser = command_parser("export", DESCRIPTION)
    add_run(parser)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="file to write (RUN/model.safetensors)")
    add("--force", action="store_true", help="replace FILE if it exists")
    asked = parser.parse_args(words)
    run = folder_of_run(asked.run)
    file: Path = asked.output or run / "model.safetensors"
    if file.is_dir() or not file.parent.is_dir():
        raise RequestError([Problem("--output", str(file), "must name a file in a folder")])
    if file.exists() and not asked.force:
        raise RequestError([Problem("--output", str(file), "exists; --force replaces it")])
    from runner.checkpoint.content import whole_model, write_model

    checkpoint, manifest = chosen(run, asked.checkpoint)
    model = whole_model(checkpoint, manifest)
    keys = {"step": "step", "config": "config_hash"}
    about = {key: str(manifest[of]) for key, of in keys.items() if manifest.get(of) is not None}
    form = "torch" if file.suffix in (".pt", ".pth", ".bin") else "safetensors"
    try:
        write_model(model, file, form, {"run": run.name, **about})
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    left_out = len(manifest.get("criterion", ()))
    without = f", without {plural(left_out, 'tensor')} of the criterion" if left_out else ""
    step = f", step {about['step']}" if "step" in about else ""
    print_line(f"{plural(len(model), 'tensor')}, {size}{step}, from {checkpoint}{without}\n{file}")
    return 0


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run and one of its checkpoints."""
    about = "checkpoint (final, or last if the run has no final weights)"
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--checkpoint", metavar="STEP|best|last|final", help=about)


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

    if name not in (None, "best", "last", files.FINAL) and not name.isdecimal():
        message = f"must be a number of optimizer steps, best, last or {files.FINAL}"
        raise RequestError([Problem("--checkpoint", name, message)])
    try:
        section = read_yaml(run / files.CONFIG)["sweep"] if name == "best" else {}
        objective, direction = str(section.get("objective")), section.get("direction")
        maximizes = direction == "maximize" or (not direction and higher_is_better(objective))
        return choose(run, name, objective, maximizes)
    except (NoCheckpoint, Refusal) as error:
        raise RequestError([Problem("RUN", str(run), str(error))]) from None
