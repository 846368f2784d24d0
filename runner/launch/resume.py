"""Decide where a run starts, before any rank does: at its first step, or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.folder import DamagedCheckpoint
from runner.config.accumulation import AUTO, AccumulationSteps
from runner.config.environment import started_rank, variable
from runner.config.identity import NO_PATH, branching, config_hash, differences
from runner.config.notation import Duration
from runner.config.plugin_section import PluginSection
from runner.config.problem import MISSING, Problem, RequestError, shown
from runner.config.reading import DamagedFile
from runner.config.schema import RunConfig
from runner.run_folder import files, keys
from runner.run_folder.status import RESUMED, is_unfinished, job_ids
from runner.run_folder.strict_json import decode, encode, number, read_object

FROM = "resumed_from"  # entry of a status: checkpoint of another run that this one started from
_BATCH = ("data.batch_size", "accumulation.steps")
_CLASS = "optimizer._target_"
_DURATION = "train.max_duration"
_FORCE = "; resume.force=true continues all the same"


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    checkpoint: Path | None = None
    step: int = 0
    former: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def status(self) -> dict[str, Any]:
        """Return the entries of the run's status that say where it starts."""
        if self.checkpoint is None:
            return {}
        if not self.former:
            return {FROM: str(self.checkpoint), "step": self.step}
        kept = {key: self.former[key] for key in ("started", FROM) if key in self.former}
        return kept | {
            "step": self.step,
            RESUMED: [*(self.former.get(RESUMED) or []), self.step],
            keys.WALL_SECONDS: number(self.former.get(keys.WALL_SECONDS)) or 0.0,
        }


ANEW = Start()
_KEEP = " (for example, checkpoint.interval=1ep saves some)"


def decide(config: RunConfig, plain: Mapping[str, Any], folder: Path) -> Start:
    """Return where a run in ``folder`` starts; a RequestError says why it cannot."""
    source = config.resume.source
    former = read_object(folder / files.STATUS)
    _require_free(folder, former)
    if former and source == "never":
        raise _taken(folder, "an unfinished run, and resume=never")
    start = newest(folder, former) if former else ANEW
    if start.checkpoint is not None:
        _require_no_older(source, folder, start.checkpoint)
    elif former and former.get("config_hash") != config_hash(plain):
        raise _taken(folder, "an unfinished run of another configuration, without a checkpoint")
    elif source not in NO_PATH:
        start = named(source)
    misfits = problems(config, plain, start)
    if misfits:
        raise RequestError(misfits)
    return start


def _require_no_older(source: str, folder: Path, checkpoint: Path) -> None:
    """Refuse to continue from an older checkpoint of the folder that the run goes on in."""
    path = Path(source).expanduser().absolute().resolve()
    if source in NO_PATH or not path.is_relative_to(folder.resolve()):
        return
    requested = named(source).checkpoint
    if requested is None or requested.resolve() != checkpoint.resolve():
        message = f"{checkpoint.name} is newer, and goes on in this folder"
        raise RequestError([Problem("resume", source, message)])


def require_readable(source: str, folder: Path) -> None:
    """Refuse a record or a checkpoint to continue from that cannot be read, without torch.

    :func:`decide` looks at the content: hashes of files, and the state, which needs torch.
    """
    _require_free(folder, read_object(folder / files.STATUS))
    if source in NO_PATH or branching(source):
        return
    path = Path(source).expanduser().absolute()
    if not os.path.exists(path):
        raise _nothing_at(source, path)
    candidates = [path] if (path / files.MANIFEST).exists() else _checkpoints_of(path)
    damaged = list[str]()
    for checkpoint in candidates:
        try:
            checkpoints.require_files(checkpoint)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    if damaged and len(damaged) == len(candidates):
        raise RequestError([Problem("resume", source, "; ".join(damaged))])


def require_one_machine(config: RunConfig) -> None:
    """Refuse what only one machine has been started for."""
    if (config.plugin.nnodes or 1) > 1 and started_rank() is None:
        message = "start this command on each machine by torchrun (see runner/launch/README.md)"
        raise RequestError([Problem("plugin.nnodes", config.plugin.nnodes, message)])


def newest(run: Path, former: Mapping[str, Any] | None = None) -> Start:
    """Return a start from the newest checkpoint of a run that is whole; warn of damaged ones.

    Args:
        run: the folder of the run, or of its checkpoints.
        former: the status of the run, if the same run goes on.
    """
    damaged = list[str]()
    for checkpoint in _checkpoints_of(run):
        try:
            manifest = _require_usable(checkpoint)
        except DamagedCheckpoint as error:
            damaged.append(f"{error}: the run does not continue from it")
            continue
        return Start(checkpoint, int(manifest.get("step") or 0), former or {}, tuple(damaged))
    return Start(warnings=tuple(damaged))


def _checkpoints_of(run: Path) -> list[Path]:
    place = run / files.CHECKPOINTS
    return checkpoints.checkpoints_in(place if place.is_dir() else run)


def requeued(plain: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the folder of the run that a job which was started again continues."""
    again = job_ids(
        slurm=bool(variable("SLURM_RESTART_COUNT")),
        elastic=bool(variable("TORCHELASTIC_RESTART_COUNT")),
    )
    if not again or (folder / files.STATUS).exists():
        return None
    for path in sorted(folder.parent.glob(f"*/{files.STATUS}"), reverse=True):
        try:
            status = read_object(path)
        except DamagedFile:  # of another run
            continue
        same = status.get("config_hash") == config_hash(plain) and is_unfinished(path.parent)
        if same and any(status.get(key) == job for key, job in again.items()):
            return path.parent
    return None


def _require_free(folder: Path, former: Mapping[str, Any]) -> None:
    if bool(former) != is_unfinished(folder):
        raise _taken(folder, f"{'an earlier run' if former else 'a damaged run'} ({files.STATUS})")


def _taken(folder: Path, by: str) -> RequestError:
    message = f"holds the record of {by}; choose another name or remove it"
    return RequestError([Problem("hydra.run.dir", str(folder), message)])


def _nothing_at(source: str, path: Path) -> RequestError:
    message = f"must be auto, never, or the path of a run or checkpoint; there is no run at {path}"
    return RequestError([Problem("resume", source, message)])


def _require_usable(checkpoint: Path) -> dict[str, Any]:
    from runner.checkpoint.content import state_of

    manifest = checkpoints.require_whole(checkpoint)
    if files.STATE in manifest["files"]:
        state_of(checkpoint)
    return manifest


def named(source: str) -> Start:
    """Return a start from a run, its checkpoints, one checkpoint, or ``RUN@STEP`` for a branch."""
    path = Path(source).expanduser().absolute()
    try:
        branch = branching(source)
        if branch is not None and not os.path.exists(path):
            run = Path(branch[0]).expanduser().absolute()
            path, _ = checkpoints.choose(run, str(branch[1]), "", False)
        manifest = _require_usable(path) if os.path.exists(path / files.MANIFEST) else None
    except (checkpoints.NoCheckpoint, DamagedCheckpoint) as error:
        raise RequestError([Problem("resume", source, str(error))]) from None
    if manifest is not None:
        if files.STATE in manifest["files"]:
            return Start(path, int(manifest.get("step") or 0))
        message = f"holds weights alone; name a checkpoint with the state of the training{_KEEP}"
    elif os.path.isdir(path):
        start = newest(path)
        if start.checkpoint is not None:
            return start
        message = "; ".join(start.warnings) or f"holds no checkpoint to continue from{_KEEP}"
    else:
        raise _nothing_at(source, path)
    raise RequestError([Problem("resume", source, message)])


def problems(config: RunConfig, plain: Mapping[str, Any], start: Start) -> list[Problem]:
    """Return why a run of this configuration cannot continue from where it would start."""
    from runner.train import build

    checkpoint = start.checkpoint
    if checkpoint is None:
        return []
    manifest = checkpoints.manifest_of(checkpoint)
    forced = config.resume.force
    advice = _FORCE
    saved = manifest.get("config")
    if not isinstance(saved, dict):
        if forced:
            return []
        return [Problem("resume", str(checkpoint), f"does not say its configuration{advice}")]
    where = f"the checkpoint {checkpoint.parent.parent.name}/{checkpoint.name}"
    samples_before = _samples(saved, manifest.get("world_size"))
    microbatch = config.data.batch_size * build.data_parts(config)
    samples = config.accumulation.phases.times(microbatch)
    may_differ: tuple[str, ...] = _BATCH if samples_before == samples else ()
    if branching(config.resume.source):
        advice = "; a branch changes keys of clip and optimizer, and data.leave_out, alone"
        may_differ += ("clip.", "optimizer.")
        before = (saved.get("data") or {}).get("leave_out") or {}
        if not any(before.values()):  # what a run has left out stays left out
            may_differ += ("data.leave_out.",)
    differing = {}
    for key, values in differences(saved, decode(encode(dict(plain)))).items():
        if key == _DURATION and _has_reached(checkpoint, values[0]):
            continue  # a longer one in another unit; _nothing_left refuses a shorter one
        if key == _CLASS or not (forced or key.startswith(may_differ)):
            differing[key] = values
    explained = not differing.keys().isdisjoint(_BATCH)
    if not forced and not explained and samples_before not in (samples, None):
        text = (
            f"a step would have {samples} samples over all ranks, and {samples_before} in "
            f"{where}{advice}"
        )
        return [Problem(_BATCH[0], config.data.batch_size, text)]
    return _unequal(differing, where, advice) or _nothing_left(config, start, where)


def _unequal(differing: Mapping[str, tuple[Any, Any]], where: str, advice: str) -> list[Problem]:
    """Return the problems of values that are others in a checkpoint: before, and in this run."""
    problems = []
    replaced = [key for key in differing if key.endswith("._target_") and key.count(".") == 1]
    for key, (before, value) in differing.items():
        section = key.partition(".")[0]
        if key not in replaced and f"{section}._target_" in replaced:
            continue  # arguments of another target
        was = "is not given" if before == MISSING else f"is {shown(before)}"
        end = advice
        if key == _CLASS:
            end = "; its state cannot be used"
        elif key == _DURATION and advice == _FORCE:
            end = f": give a longer one in the same unit{advice}"
        typed = "(not given)" if value == MISSING else value
        problems.append(Problem(key, typed, f"{was} in {where}{end}"))
    return problems


def _nothing_left(config: RunConfig, start: Start, where: str) -> list[Problem]:
    """Return a problem if a new run would begin where it ends."""
    if start.former or start.checkpoint is None:  # a run that was killed after its last step
        return []
    duration = str(config.train.max_duration)
    if not _has_reached(start.checkpoint, duration):
        return []
    text = f"{where} has come as far already: give a longer train.max_duration"
    return [Problem(_DURATION, duration, text)]


def _has_reached(checkpoint: Path, duration: object) -> bool:
    """Return whether the training of a checkpoint has come as far as a duration."""
    from runner.checkpoint.content import state_of
    from runner.train.progress import Progress

    progress = state_of(checkpoint)["progress"]
    try:
        return isinstance(progress, Mapping) and Progress(**progress).reached(
            Duration.parse(duration)
        )
    except ValueError:  # no duration
        return False


def _samples(saved: Mapping[str, Any], world_size: object) -> str | None:
    """Return the samples of a step of the run that has saved, in each phase, as text.

    Returns:
        None if its record does not tell.
    """
    from runner.train.build import data_parallel_size

    try:
        plugin = PluginSection.model_validate(saved["plugin"])
        microbatch = int(saved["data"]["batch_size"])
        steps = saved["accumulation"]["steps"]
        phases = AccumulationSteps.of(1 if steps == AUTO else steps)
        return phases.times(microbatch * data_parallel_size(plugin, int(str(world_size))))
    except (KeyError, TypeError, ValueError):
        return None
