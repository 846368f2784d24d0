"""Decide where a run starts: at its first step, or from a checkpoint.

The process that the user started decides, before any rank starts. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint.folder import DamagedCheckpoint, found, require_whole, whole
from runner.config.environment import (
    elastic_agent,
    elastic_job,
    restarts,
    slurm_job,
    was_requeued,
)
from runner.config.folders import outputs
from runner.config.identity import config_hash
from runner.config.problem import Problem, RequestError
from runner.config.schema import RunConfig
from runner.launch.other_configuration import problems
from runner.run_folder import files, keys
from runner.run_folder.status import (
    ELASTIC_AGENT,
    ELASTIC_JOB,
    RESUMED,
    SLURM_JOB,
    WANDB_STEP,
    is_unfinished,
    now,
    state_of,
)
from runner.run_folder.strict_json import number, read_object

RECENT = 3
"""Number of earlier runs that are looked at for an unfinished one of the same configuration."""

WORDS = ("auto", "never")
"""Values of ``resume`` that are no path."""

FROM = "resumed_from"
"""Entry of a status: checkpoint of another run that this one started from."""


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    checkpoint: Path | None = None
    step: int = 0
    former: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Wall time of the run before."""
        return number(self.former.get(keys.WALL_SECONDS)) or 0.0

    def status(self, last_step: int) -> dict[str, Any]:
        """Return the entries of the run's status that differ from those of a new run."""
        if self.checkpoint is None:
            return {}
        if not self.former:
            return {FROM: str(self.checkpoint), "step": self.step}
        before, sent = self.former.get(RESUMED), self.former.get(WANDB_STEP)
        kept = {key: self.former[key] for key in ("started", FROM) if key in self.former}
        return kept | {
            "step": self.step,
            RESUMED: [*(before if isinstance(before, list) else []), self.step],
            WANDB_STEP: max(last_step, sent if isinstance(sent, int) else 0),
            keys.WALL_SECONDS: self.seconds,
        }


ANEW = Start()


def decide(config: RunConfig, plain: Mapping[str, Any], folder: Path) -> Start:
    """Return where a run in ``folder`` starts."""
    source = config.resume.source
    former = record_of(folder)
    if former and not is_unfinished(folder):
        raise RequestError([_taken(folder, f"an earlier run ({files.STATUS})")])
    if not former and is_unfinished(folder):
        raise RequestError([_taken(folder, "a run whose status and checkpoints are damaged")])
    if former and source == "never":
        raise RequestError([_taken(folder, "an unfinished run, and resume=never")])
    if former:
        start = _newest(folder / files.CHECKPOINTS, former)
        if start.checkpoint is not None:
            _require_newest(source, folder, start.checkpoint)
            _require_same(config, plain, start.checkpoint)
            return start
        if former.get("config_hash") != config_hash(plain):
            message = "an unfinished run of another configuration, without a checkpoint"
            raise RequestError([_taken(folder, message)])
        if source == "auto":
            return start
    if source in WORDS:
        return ANEW
    start = named(source)
    assert start.checkpoint is not None
    _require_same(config, plain, start.checkpoint)
    return start


def record_of(folder: Path) -> dict[str, Any]:
    """Return the status of a run; where it is lost, what the newest whole checkpoint says."""
    status = read_object(folder / files.STATUS)
    if status.get("state"):
        return status
    for _, manifest in whole(folder / files.CHECKPOINTS):
        kept = {key: manifest.get(key) for key in ("config_hash", "wandb_run_id")}
        return {**kept, "started": now()}
    return status


def newest(folder: Path) -> Start:
    """Return a start from the newest checkpoint of a run; from the first step if none is whole."""
    return _newest(folder / files.CHECKPOINTS, {})


def is_usable(folder: Path) -> bool:
    """Return whether the folder of a run holds a checkpoint that is whole."""
    return newest(folder).checkpoint is not None


def requeued(plain: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the folder of the run that a job continues which Slurm or torchrun starts again."""
    again = {SLURM_JOB: slurm_job()} if was_requeued() else {}
    again |= {ELASTIC_AGENT: elastic_agent()} if elastic_agent() else {}
    again |= {ELASTIC_JOB: elastic_job()} if restarts() else {}
    if not again or (folder / files.STATUS).exists():
        return None
    for other in _beside(folder):
        status = read_object(other / files.STATUS)
        same = any(status.get(key) == job for key, job in again.items()) and _is_same(status, plain)
        if same and is_unfinished(other):
            return other
    return None


def unfinished(plain: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield a note if a run of the same configuration that ended early could be continued."""
    if folder.parent != outputs() / "runs":
        return
    for other in _beside(folder)[:RECENT]:
        status = read_object(other / files.STATUS)
        ended = state_of(status) in ("killed", "failed", "interrupted")
        if ended and _is_same(status, plain) and found(other / files.CHECKPOINTS):
            yield (
                f"a run of this configuration ended early, at step {status.get('step')}: "
                f"hydra.run.dir={other} continues it"
            )
            return


def _taken(folder: Path, by: str) -> Problem:
    message = f"holds the record of {by}; choose another name or remove it"
    return Problem("hydra.run.dir", str(folder), message)


def _beside(folder: Path) -> list[Path]:
    """Return the other folders in the same place, the newest first by their names."""
    try:
        others = [one for one in folder.parent.iterdir() if one != folder]
    except OSError:
        return []
    return sorted(others, key=lambda one: one.name, reverse=True)


def _is_same(status: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    return status.get("config_hash") == config_hash(plain)


def _newest(checkpoints: Path, former: Mapping[str, Any]) -> Start:
    """Start from the newest checkpoint that is whole, or anew if none is."""
    damaged: list[str] = []
    for checkpoint in found(checkpoints):
        try:
            manifest = _require_usable(checkpoint)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            continue
        warnings = _passed_over(damaged, f"the run continues from {checkpoint.name}")
        return Start(checkpoint, _step(manifest), former, warnings=warnings)
    return Start(warnings=_passed_over(damaged, "the run starts anew"))


def _require_usable(checkpoint: Path) -> dict[str, Any]:
    """Check a checkpoint, with the state of the training in it, and return its manifest."""
    from runner.checkpoint.content import state_of

    manifest = require_whole(checkpoint)
    if files.STATE in manifest["files"]:
        state_of(checkpoint)
    return manifest


def _passed_over(damaged: Sequence[str], instead: str) -> tuple[str, ...]:
    return (f"{'; '.join(damaged)}: {instead}",) if damaged else ()


def named(source: str) -> Start:
    """Return a start from what ``resume=PATH`` names: a run, its checkpoints, or one checkpoint."""
    path = _absolute(source)
    if (path / files.MANIFEST).exists():
        try:
            manifest = _require_usable(path)
        except DamagedCheckpoint as error:
            raise RequestError([Problem("resume", source, str(error))]) from None
        if files.STATE not in manifest["files"]:
            message = "holds weights alone; name a checkpoint with the state of the training"
            raise RequestError([Problem("resume", source, message)])
        return Start(path, _step(manifest))
    start = _newest(path / files.CHECKPOINTS, {})
    if start.checkpoint is None and not start.warnings:
        start = _newest(path, {})
    if start.checkpoint is None:
        message = "must be auto, never, or the path of a run or checkpoint"
        if path.is_dir():
            message = "holds no checkpoint to continue from"
        if start.warnings:
            message = start.warnings[0].rpartition(":")[0]
        raise RequestError([Problem("resume", source, message)])
    return start


def _require_newest(source: str, folder: Path, newest: Path) -> None:
    """Refuse ``resume=PATH`` if it names an older checkpoint of the run's own folder."""
    if source in WORDS or not _absolute(source).resolve().is_relative_to(folder.resolve()):
        return
    checkpoint = named(source).checkpoint
    if checkpoint is None or checkpoint.resolve() != newest.resolve():
        message = f"{newest.name} is newer, and goes on in this folder: choose another folder"
        raise RequestError([Problem("resume", source, message)])


def _absolute(source: str) -> Path:
    return Path(source).expanduser().absolute()


def _step(manifest: Mapping[str, Any]) -> int:
    step = manifest.get("step")
    return step if isinstance(step, int) else 0


def _require_same(config: RunConfig, plain: Mapping[str, Any], checkpoint: Path) -> None:
    if found := problems(config, plain, checkpoint):
        raise RequestError(found)
