"""What a checkpoint holds, how all ranks write and read it together, and when.

Tensors lie in safetensors files under their names in the whole model, so that any layout of ranks
can read them. The rest of the state is ``state.pt``.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from runner.checkpoint import folder, states
from runner.checkpoint.folder import DamagedCheckpoint
from runner.checkpoint.shards import Folder, one_error, write, write_later
from runner.checkpoint.states import OPTIMIZER, BoostedModel, BoostedOptimizer
from runner.config.notation import MINUTES, Duration, higher_is_better
from runner.parallel.collectives import from_all, is_first, on_first, several_ranks
from runner.run_folder import files, keys
from runner.run_folder.strict_json import replacing

# What the state of a training holds besides tensors.
STATE_KEYS = {"progress", "meter", "clip", "schedulers", "microbatch", "random", "optimizers"}


class Ranks(Protocol):
    """The ranks of a training: a :class:`runner.booster.Plugin`."""

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of all ranks."""


class Training(Protocol):
    """What is saved: a :class:`runner.Trainer`."""

    model: BoostedModel
    optimizer: BoostedOptimizer
    device: torch.device
    state: Any

    @property
    def plugin(self) -> Ranks:
        """The ranks."""


def save(training: Training, checkpoints: Path, step: int | None, about: Mapping[str, Any]) -> Path:
    """Save a training between two steps, or its weights as ``final``; return the checkpoint.

    Every rank calls this.
    """
    if step is None:
        tensors = _model(training)
        state = None
    else:
        tensors, state = _content(training)
    manifest = _manifest(training, step, about)
    part = on_first(lambda: folder.begin(checkpoints, step))
    with _removed_on_error(part):
        write(tensors, part)
        return on_first(lambda: _complete(part, state, manifest))


@contextmanager
def _removed_on_error(part: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        on_first(lambda: shutil.rmtree(part, ignore_errors=True))
        reason = f"no checkpoint can be written to {part.parent}: {error.strerror or error}"
        raise OSError(error.errno, reason) from error


def _complete(part: Path, state: bytes | None, manifest: dict[str, Any]) -> Path:
    if state is not None:
        (part / files.STATE).write_bytes(state)
    return folder.complete(part, manifest)


def load(
    training: Training, checkpoint: Path, verify: bool = True, keep: Collection[str] = ()
) -> None:
    """Continue a training from a checkpoint, under any layout; every rank has to call this."""
    read = folder.require_whole if verify else folder.manifest_of
    manifest = on_first(lambda: read(checkpoint))
    if files.STATE not in manifest["files"]:
        raise ValueError(f"{checkpoint} holds weights alone: no training can continue from it")
    state = state_of(checkpoint)
    source = Folder(checkpoint)
    try:
        training.state.require(state)
        tensors, assign = states.optimizer_slots(
            training.optimizer, source.stored, state.pop("optimizers"), keep
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{checkpoint} holds no state of a training: {error}") from None
    source.fill(states.model_slots(training.model) | tensors)
    assign()
    training.state.load_state_dict(state, keep)


def load_weights(training: Training, checkpoint: Path | None) -> None:
    """Load the weights alone, to evaluate them, from the checkpoint that the first rank names."""
    chosen = on_first(lambda: checkpoint)
    assert chosen is not None
    Folder(chosen).fill(states.model_slots(training.model))


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the state of a training besides its tensors; no code in the file is run."""
    path = checkpoint / files.STATE
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of files of other programs
            state = torch.load(path, map_location="cpu", weights_only=True)
        if not state.keys() >= STATE_KEYS:
            raise ValueError
    except Exception as error:  # the advice of torch's own message would run the code
        message = f"{path} is no state of a training ({type(error).__name__})"
        raise DamagedCheckpoint(message) from None
    return dict(state)


def _content(training: Training) -> tuple[dict[str, Tensor], bytes]:
    """Return the tensors of this rank, and the other state as a file on the first rank."""
    state = _state(training)
    random_states = from_all(state["random"])
    state["random"] = {key: value for part in random_states for key, value in part.items()}
    content = bytearray()
    on_first(lambda: content.extend(states.packed(state)))
    return _model(training) | states.optimizer_tensors(training.optimizer), bytes(content)


def _state(training: Training) -> dict[str, Any]:
    """Return the state of a training besides its tensors, on this rank."""
    state: dict[str, Any] = training.state.state_dict(with_optimizers=False)
    return state | {"optimizers": states.optimizer_values(training.optimizer)}


def _manifest(training: Training, step: int | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says besides version and files."""
    tied = {name: first for name, first in training.model.names.items() if name != first}
    return {"step": step, "tied": tied, **about}


def _model(training: Training) -> dict[str, Tensor]:
    return states.model_tensors(training.model, with_buffers=training.plugin.data_rank == 0)


def whole_model(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of the whole model; tied weights are one tensor."""
    source = Folder(checkpoint)
    try:
        model: dict[str, Tensor] = {
            name: torch.empty(stored.shape, dtype=stored.dtype)
            for name, stored in source.stored.items()
            if not name.startswith(OPTIMIZER)
        }
        source.fill({name: [tensor] for name, tensor in model.items()})
        tied = {name: model[first] for name, first in (manifest.get("tied") or {}).items()}
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from error
    except (KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{checkpoint} does not hold {error}") from error
    return model | tied


def write_model(
    model: Mapping[str, Tensor], file: Path, form: str, metadata: Mapping[str, str]
) -> None:
    """Write a state dict as ``safetensors`` or ``torch``; the file gets its name when complete."""
    with replacing(file) as part:
        try:
            if form == "torch":
                torch.save(dict(model), part)
                return
            # Tied tensors are copied: safetensors refuses to write shared memory.
            owners = {id(tensor): name for name, tensor in model.items()}
            tensors = {
                name: tensor if owners[id(tensor)] == name else tensor.clone()
                for name, tensor in model.items()
            }
            safetensors.torch.save_file(tensors, part, {"format": "pt", **metadata})
        except (RuntimeError, safetensors.SafetensorError) as error:  # a full disk, for example
            raise OSError(str(error)) from error


class CheckpointSaver:
    """Saves a training at intervals: a callback of :class:`runner.Trainer`.

    A checkpoint is a folder ``step_<number>`` that holds everything to continue with the same
    steps. It gets its name when it is complete, so an interrupted write leaves the one before it.

    Args:
        folder: folder of all checkpoints of the run, on a disk that all ranks share.
        interval: duration between checkpoints, such as ``500ba`` or ``10min``; None: only when the
            training is asked to stop.
        keep: number of newest checkpoints to keep; 0: none is saved.
        best: metric by which one more checkpoint is kept, such as ``eval/loss``: the checkpoint
            whose last evaluation is the best. None: no further checkpoint is kept.
        maximizes: whether a higher value of ``best`` is better; by default it is of an accuracy.
        save_final: whether to save the last weights in ``final``.
        asynchronous: whether training goes on while files are written, which takes host memory for
            a copy; by default on accelerators.
        about: what each manifest says besides step, metrics and world size: a JSON-like dict.

    Example:
        >>> saver = CheckpointSaver("checkpoints", "100ba", best="eval/loss")
        >>> trainer = Trainer(model, loader, "10ep", eval_dataloader=held_out, callbacks=[saver])
        >>> trainer.load("checkpoints/step_000000300")  # in a later process
        >>> trainer.fit()
    """

    def __init__(
        self,
        folder: Path | str,
        interval: str | Duration | None = "10min",
        *,
        keep: int = 2,
        best: str | None = None,
        maximizes: bool | None = None,
        save_final: bool = True,
        asynchronous: bool | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.interval = Duration.parse_interval(interval) if isinstance(interval, str) else interval
        self.keep = keep
        self.best = best
        self.save_final = save_final
        self._maximizes = higher_is_better(best or "") if maximizes is None else maximizes
        self._asynchronous = asynchronous
        self._about = dict(about or {})
        self._writing: tuple[Path, Future[None]] | None = None
        self._group: Any = None
        self._saved = time.monotonic()

    @property
    def duration(self) -> Duration | None:
        """The interval, if it is counted in steps, samples, tokens or epochs."""
        counted = self.interval is not None and self.interval.unit != MINUTES
        return self.interval if counted and self.keep else None

    def begin(self, training: Training, step: int) -> None:
        """Check before the first step that checkpoints can be saved; every rank has to call this.

        Raises:
            ValueError: the folder holds checkpoints of another training, which would be removed;
                or the state of the training cannot be saved.
        """
        if not self.keep:
            return
        newest = None if step else on_first(lambda: next(folder.whole(self.folder), None))
        if newest is not None:
            raise ValueError(
                f"{self.folder} holds {newest[0].name} of an earlier training, which this one "
                "would remove: load it to continue, or choose another folder"
            )
        state = _state(training)
        on_first(lambda: len(states.packed(state)))  # raises if it could not be loaded again

    def due(self) -> bool:
        """Return whether this rank asks for a checkpoint, also to raise that one has failed."""
        finished = None if self._writing is None else self._writing[1]
        failed = finished is not None and finished.done() and finished.exception() is not None
        return failed or (is_first() and self.overdue())

    def overdue(self) -> bool:
        """Return whether the minutes of the interval have passed, by the clock of this rank."""
        if self.interval is None or self.interval.unit != MINUTES or not self.keep:
            return False
        return time.monotonic() - self._saved >= 60 * self.interval.value

    def save(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        """Save a checkpoint between two steps, with the last metrics; every rank has to call this.

        An OSError, of this checkpoint or the one before, is raised on every rank.
        """
        self.wait()
        if not self.keep:
            return
        about = self._described(training, metrics)
        asynchronous = self._asynchronous
        if asynchronous is None:
            asynchronous = training.device.type != "cpu"
        if asynchronous:
            self._save_later(training, step, about)
        else:
            save(training, self.folder, step, about)
            if is_first():
                self._prune(step)
        self._saved = time.monotonic()

    def _save_later(self, training: Training, step: int, about: Mapping[str, Any]) -> None:
        """Let threads write while the training goes on, from copies in host memory."""
        if self._group is None and several_ranks():
            # Its collectives run in a thread, beside the collectives of the training.
            self._group = dist.new_group(backend="gloo")
        tensors, state = _content(training)
        manifest = _manifest(training, step, about)
        part = on_first(lambda: folder.begin(self.folder, step))
        written = write_later(tensors, part, self._group)

        def finish() -> None:
            with one_error():
                written.result()
            if is_first():
                _complete(part, state, manifest)
                self._prune(step)

        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = (part, executor.submit(finish))
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; every rank has to call this."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            part, finished = writing
            wait([finished])
            with _removed_on_error(part):
                on_first(finished.result)

    def finish(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        """Complete the last checkpoint, and save the final weights; every rank has to call this."""
        self.wait()
        if self.save_final:
            save(training, self.folder, None, {"step": step, **self._described(training, metrics)})

    def _described(self, training: Training, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the manifest of a checkpoint says about its training."""
        kept = {
            key: value
            for key, value in metrics.items()
            if key.startswith(keys.EVAL) or key == self.best
        }
        return {**self._about, "metrics": kept, "world_size": training.plugin.world_size}

    def _prune(self, step: int) -> None:
        folder.prune(self.folder, self.keep, self.best, self._maximizes, newest=step)
