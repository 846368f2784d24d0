"""``python -m runner export RUN``: write the weights of a run as one file for a plain model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cli import FAILED
from runner.cli.checkpoints import chosen, folder_of_run, which
from runner.config.notation import plural
from runner.config.problem import Problem, RequestError

if TYPE_CHECKING:
    from runner.checkpoint.export import Format

SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
}
"""Formats of files by the end of their name; the first of each format is its default."""

DESCRIPTION = """\
Write the weights of a run as one file: the state dict of the whole model, whatever plugin trained
it, under the names of the plain model. `model.load_state_dict(safetensors.torch.load_file(FILE))`
loads it, or `torch.load(FILE)` with --format torch.

Exit codes: 0 written   1 the checkpoint is damaged, or the file cannot be written
2 there is no such checkpoint, or the file exists"""


def main(words: Sequence[str] | None = None) -> int:
    """Write the file and print its name."""
    asked = _parser().parse_args(words)
    run = folder_of_run(asked.run)
    file, form = _destination(asked, run)
    from runner.checkpoint.export import whole_model, write
    from runner.checkpoint.folder import DamagedCheckpoint

    try:
        checkpoint, manifest = chosen(run, asked.checkpoint)
        model = whole_model(checkpoint, manifest)
    except (DamagedCheckpoint, OSError) as error:
        print(f"clip-runner: {error}", file=sys.stderr)
        return FAILED
    about = {"run": run.name, "step": manifest.get("step"), "config": manifest.get("config_hash")}
    known = {key: str(value) for key, value in about.items() if value is not None}
    try:
        write(model, file, form, known)
    except OSError as error:
        print(f"clip-runner: {file} cannot be written: {error}", file=sys.stderr)
        return FAILED
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    left_out = len(manifest.get("criterion", ()))
    without = f", without {plural(left_out, 'tensor')} of the criterion" if left_out else ""
    step = "" if "step" not in known else f", step {known['step']}"
    print(f"{plural(len(model), 'tensor')}, {size}{step}, from {checkpoint}{without}")
    print(file)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runner export",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (RUN/model.safetensors)"
    )
    parser.add_argument(
        "--format",
        choices=list(dict.fromkeys(SUFFIXES.values())),
        help="safetensors, or torch for what torch.save writes (by the end of FILE's name)",
    )
    parser.add_argument(
        "--checkpoint",
        type=which,
        metavar="STEP|best|last|final",
        help="checkpoint to export (final, or last if the run has no final weights)",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    return parser


def _destination(asked: argparse.Namespace, run: Path) -> tuple[Path, Format]:
    """Return the file to write and its format."""
    by_name = SUFFIXES.get(asked.output.suffix) if asked.output else None
    form: Format = asked.format or by_name or "safetensors"
    suffix = next(suffix for suffix, of in SUFFIXES.items() if of == form)
    file: Path = asked.output or run / f"model{suffix}"
    message = None
    if file.is_dir():
        message = "is a folder; name a file"
    elif not file.parent.is_dir():
        message = f"there is no folder {file.parent}"
    elif file.exists() and not asked.force:
        message = "exists; --force replaces it"
    if message is not None:
        raise RequestError([Problem("--output", str(file), message)])
    return file, form
