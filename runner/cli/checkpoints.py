"""``python -m runner evaluate RUN`` and ``export RUN``: use the checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.cli import FAILED, command_parser, folder
from runner.config.environment import joins
from runner.config.folders import Refusal, read_yaml
from runner.config.notation import higher_is_better, plural
from runner.config.problem import Problem, RequestError
from runner.run_folder import files
from runner.telemetry.sinks.console import print_line


def evaluate(words: Sequence[str]) -> int:
    """Evaluate a checkpoint of a run on held-out data.

    Prints loss and accuracy. Plugin and number of local ranks are those of the run, so that a large
    model fits and the values are those that the run logged; plugin=single evaluates in one process.
    Under torchrun or Slurm it uses the ranks that are there. Overrides such as data=OPTION and
    data.batch_size=N choose other data. Nothing is written.

    Exit codes: 0 evaluated   1 the checkpoint is damaged, or a rank failed
    2 the request was wrong   130, 143 interrupted
    """
    parser = _parser(evaluate)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the run's configuration")
    add("--config-dir", "-cd", type=folder, metavar="FOLDER", help="options of your own")
    asked = parser.parse_intermixed_args(words)
    run = asked.run
    from runner.cli.arguments import check_jobs, on_ranks
    from runner.config.jobs import recorded
    from runner.launch.failure import Failure
    from runner.launch.resume import require_one_machine

    job = recorded(run / files.CONFIG, asked.overrides, asked.config_dir)
    require_one_machine(job.config)
    check_jobs([job])
    from runner.train.build import evaluate as work

    # The first rank tells the others which checkpoint.
    checkpoint, manifest = (None, {}) if joins() else _chosen(run, asked.checkpoint)
    # Local ranks log to the folder of a run; nothing of it is kept.
    with tempfile.TemporaryDirectory(prefix="clip-runner-") as home:
        found = on_ranks(job.config, Path(home), partial(work, checkpoint=checkpoint))
    if isinstance(found, Failure):
        return found.exit_code
    if not found["metrics"]:
        print_line("clip-runner: there is no held-out data to evaluate on", sys.stderr)
        return FAILED
    at = "" if manifest.get("step") is None else f", step {manifest['step']}"
    ranks = plural(found["world_size"], "rank")
    print_line(f"{checkpoint}{at}; plugin={job.config.plugin.name} on {ranks}")
    for key, value in found["metrics"].items():
        print_line(f"{key:<14} {value}")
    return 0


def export(words: Sequence[str]) -> int:
    """Write the weights of a run as one file for a plain model.

    It has the state dict of the whole model, whatever plugin trained it, under the names of the
    plain model. `model.load_state_dict(safetensors.torch.load_file(FILE))` loads it, or
    `torch.load(FILE)` if FILE ends in .pt, .pth or .bin.

    Exit codes: 0 written   1 the checkpoint is damaged, or the file cannot be written
    2 there is no such checkpoint, or the file exists
    """
    parser = _parser(export)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="file to write (RUN/model.safetensors)")
    add("--force", action="store_true", help="replace FILE if it exists")
    asked = parser.parse_args(words)
    run, file = asked.run, asked.output or asked.run / "model.safetensors"
    message = "" if file.parent.is_dir() and not file.is_dir() else "must name a file in a folder"
    if message or (file.exists() and not asked.force):
        message = message or "exists; --force replaces it"
        raise RequestError([Problem("--output", str(file), message)])
    from runner.checkpoint.content import whole_model, write_model

    checkpoint, manifest = _chosen(run, asked.checkpoint)
    model = whole_model(checkpoint, manifest)
    keys = {"step": "step", "config": "config_hash"}
    about = {key: str(manifest[of]) for key, of in keys.items() if manifest.get(of) is not None}
    form = "torch" if file.suffix in (".pt", ".pth", ".bin") else "safetensors"
    try:
        write_model(model, file, form, {"run": run.name, **about})
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    at = f", step {about['step']}" if "step" in about else ""
    print_line(f"{plural(len(model), 'tensor')}, {size}{at}, from {checkpoint}\n{file}")
    return 0


def _parser(command: Callable[..., int]) -> argparse.ArgumentParser:
    parser = command_parser(command)
    about = "checkpoint (final, or last if the run has no final weights)"
    parser.add_argument("run", type=_run, metavar="RUN", help="folder of a run")
    parser.add_argument("--checkpoint", metavar="STEP|best|last|final", help=about)
    return parser


def _run(text: str) -> Path:
    run = Path(text).absolute()
    message = "" if run.is_dir() else "there is no such folder"
    if (run / files.SWEEP).exists():
        message = f"is a sweep; name one of its runs, such as {Path(text) / '0'}"
    if message:
        raise RequestError([Problem("RUN", text, message)])
    return run


def _chosen(run: Path, name: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a whole checkpoint of a run and its manifest."""
    from runner.checkpoint.folder import NoCheckpoint, choose

    try:
        config = read_yaml(run / files.CONFIG) if name == "best" else {}
        section = (config.get("sweep") if isinstance(config, dict) else None) or {}
        objective, direction = str(section.get("objective")), section.get("direction")
        maximizes = direction == "maximize" or (not direction and higher_is_better(objective))
        return choose(run, name, objective, maximizes)
    except (NoCheckpoint, Refusal) as error:
        raise RequestError([Problem("RUN", str(run), str(error))]) from None
