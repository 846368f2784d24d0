"""What a checkpoint holds, and how all ranks write and read it together.

Tensors lie in safetensors files of :mod:`torch.distributed.checkpoint`, under their names in the
whole model, so that any layout of ranks can read them. The rest of the state is ``state.pt``.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.booster import ModelWrapper, OptimizerWrapper, Plugin, saved
from runner.booster.booster import CRITERION
from runner.booster.saved import OPTIMIZER
from runner.checkpoint import folder
from runner.checkpoint.folder import DamagedCheckpoint
from runner.parallel.collectives import is_first, on_first, several_ranks
from runner.parallel.sharded_files import Folder, fill, one_error, write, write_later
from runner.run_folder import files
from runner.run_folder.strict_json import replacing

STATE_KEYS = {"progress", "meter", "clip", "schedulers", "microbatch", "random", "optimizers"}
"""What the state of a training holds besides tensors."""


class Training(Protocol):
    """What is saved: a :class:`runner.Trainer`."""

    model: ModelWrapper
    optimizer: OptimizerWrapper
    criterion: Any
    plugin: Plugin
    device: torch.device
    state: Any


def save(training: Training, checkpoints: Path, step: int, about: Mapping[str, Any]) -> Path:
    """Save a training between two steps; every rank has to call this."""
    return _write(training, checkpoints, step, *_content(training), about)


def save_weights(training: Training, checkpoints: Path, about: Mapping[str, Any]) -> Path:
    """Save the weights alone as the checkpoint ``final``; every rank has to call this."""
    return _write(training, checkpoints, None, _model(training), None, about)


def _write(
    training: Training,
    checkpoints: Path,
    step: int | None,
    tensors: dict[str, Tensor],
    rest: bytes | None,
    about: Mapping[str, Any],
) -> Path:
    content = _about(training, step, about)
    part = on_first(lambda: folder.begin(checkpoints, step))
    with _removed_on_error(part):
        write(tensors, part)
        return on_first(lambda: _complete(part, rest, content))


class Writing:
    """A checkpoint that threads write while the training goes on; see :func:`save`.

    Its tensors were copied to host memory. ``group`` is for the collectives of the thread, and
    ``after`` is called on the first rank when the checkpoint is complete.
    """

    def __init__(
        self,
        training: Training,
        checkpoints: Path,
        step: int,
        about: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        after: Callable[[], None],
    ) -> None:
        tensors, rest = _content(training)
        content = _about(training, step, about)
        part = self._part = on_first(lambda: folder.begin(checkpoints, step))
        written = write_later(tensors, part, group)

        def finish() -> None:
            with one_error():
                written.result()
            if is_first():
                _complete(part, rest, content)
                after()

        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._finished: Future[None] = executor.submit(finish)
        executor.shutdown(wait=False)

    def failed(self) -> bool:
        return self._finished.done() and self._finished.exception() is not None

    def wait(self) -> None:
        wait([self._finished])
        with _removed_on_error(self._part):
            on_first(self._finished.result)


@contextmanager
def _removed_on_error(part: Path) -> Iterator[None]:
    """Remove an unfinished checkpoint after an error, which all ranks have; say where it was."""
    try:
        yield
    except OSError as error:
        on_first(lambda: shutil.rmtree(part, ignore_errors=True))
        reason = error.strerror or str(error)
        message = f"no checkpoint can be written to {part.parent}: {reason}"
        raise OSError(error.errno, message) from error


def _complete(part: Path, rest: bytes | None, about: dict[str, Any]) -> Path:
    if rest is not None:
        (part / files.STATE).write_bytes(rest)
    return folder.complete(part, about)


def load(
    training: Training, checkpoint: Path, verify: bool = True, keep: Collection[str] = ()
) -> dict[str, Any]:
    """Continue a training from a checkpoint, under any layout; every rank has to call this."""
    read = folder.require_whole if verify else folder.manifest_of
    manifest = on_first(lambda: read(checkpoint))
    if files.STATE not in manifest["files"]:
        raise ValueError(f"{checkpoint} holds weights alone: no training can continue from it")
    rest, source = state_of(checkpoint), Folder(checkpoint)
    try:
        training.state.require(rest)
        tensors, assign = saved.optimizer_slots(
            training.optimizer, source.stored, rest.pop("optimizers"), keep
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{checkpoint} holds no state of a training: {error}") from None
    fill(_model_slots(training) | tensors, source)
    assign()
    training.state.load_state_dict(rest, keep)
    return manifest


def load_weights(training: Training, checkpoint: Path) -> None:
    """Load the weights alone, to evaluate them, from a checkpoint that was checked."""
    fill(_model_slots(training), Folder(checkpoint))


def require_savable(training: Training) -> None:
    """Check that the state of a training can be saved and loaded; every rank has to call this."""
    rest = _values(training)
    on_first(lambda: len(saved.packed(rest)))


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return the state of a training besides its tensors; no code in the file is run."""
    path = checkpoint / files.STATE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those about what other programs write
            rest = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the advice of torch's own message would run the code
        kind = type(error).__name__
        raise DamagedCheckpoint(f"{path} is no state of a training ({kind})") from None
    if not isinstance(rest, dict) or not rest.keys() >= STATE_KEYS:
        raise DamagedCheckpoint(f"{path} is no state of a training")
    return rest


def _content(training: Training) -> tuple[dict[str, Tensor], bytes]:
    """Return the tensors of this rank, and the rest of the state as a file on the first rank."""
    rest = _values(training)
    if several_ranks():
        parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, rest["random"])
        rest["random"] = {key: value for part in parts for key, value in part.items()}
    content = bytearray()
    on_first(lambda: content.extend(saved.packed(rest)))
    return _model(training) | saved.optimizer_tensors(training.optimizer), bytes(content)


def _values(training: Training) -> dict[str, Any]:
    rest: dict[str, Any] = training.state.state_dict(with_optimizers=False)
    return rest | {"optimizers": saved.optimizer_values(training.optimizer)}


def _about(training: Training, step: int | None, about: Mapping[str, Any]) -> dict[str, Any]:
    tied = {name: first for name, first in training.model.names.items() if name != first}
    return {"step": step, "tied": tied, "criterion": list(_criterion(training)), **about}


def _model(training: Training) -> dict[str, Tensor]:
    first = training.plugin.data_rank == 0
    return saved.model_tensors(training.model, with_buffers=first) | _criterion(training)


def _model_slots(training: Training) -> dict[str, list[Tensor]]:
    criterion = {name: [tensor] for name, tensor in _criterion(training).items()}
    return saved.model_slots(training.model) | criterion


def _criterion(training: Training) -> dict[str, Tensor]:
    held = training.criterion.state_dict() if isinstance(training.criterion, nn.Module) else {}
    return {CRITERION + name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def whole_model(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of the whole model, without the criterion; tied weights are one."""
    source, others = Folder(checkpoint), set(manifest.get("criterion", ()))
    model: dict[str, Tensor] = {
        name: torch.empty(one.shape, dtype=one.dtype)
        for name, one in source.stored.items()
        if not name.startswith(OPTIMIZER) and name not in others
    }
    source.read({name: [tensor] for name, tensor in model.items()})
    return model | {name: model[first] for name, first in manifest.get("tied", {}).items()}


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
            owner = {id(tensor): name for name, tensor in model.items()}
            own = {n: t if owner[id(t)] == n else t.clone() for n, t in model.items()}
            safetensors.torch.save_file(own, part, {"format": "pt", **metadata})
        except (RuntimeError, safetensors.SafetensorError) as error:  # a full disk, for example
            raise OSError(str(error)) from error
