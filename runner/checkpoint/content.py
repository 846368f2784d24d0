"""What a checkpoint holds, and how all ranks write and read it together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.booster import ModelWrapper, OptimizerWrapper, Plugin, saved
from runner.booster.joint import CRITERION
from runner.checkpoint import folder
from runner.checkpoint.folder import DamagedCheckpoint
from runner.checkpoint.pending import Pending
from runner.checkpoint.space import explained, require_space
from runner.parallel.collectives import on_first, several_ranks
from runner.parallel.sharded_files import Folder, fill, write, write_later
from runner.run_folder import files

STATE_KEYS = {"progress", "meter", "clip", "schedulers", "microbatch", "random", "optimizers"}
"""What the state of a training holds besides tensors."""


class Stateful(Protocol):
    """The training state besides model and optimizers."""

    def state_dict(self, with_optimizers: bool = True) -> dict[str, Any]:
        """Return the state; see :class:`runner.train.state.TrainState`."""

    def require(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if the training cannot continue from a state."""

    def load_state_dict(self, state: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Continue from a state."""


class Training(Protocol):
    """What is saved: :class:`runner.Trainer` is one."""

    model: ModelWrapper
    optimizer: OptimizerWrapper
    criterion: Any
    plugin: Plugin
    device: torch.device

    @property
    def state(self) -> Stateful:
        """The rest of the state."""


def save(training: Training, checkpoints: Path, step: int, about: Mapping[str, Any]) -> Path:
    """Save a training between two steps; every rank has to call this."""
    tensors, rest = _content(training)
    content = {"step": step, **_names(training), **about}
    part = _begin(checkpoints, step, tensors)
    with explained(part):
        write(tensors, part)
        return on_first(lambda: _complete(part, rest, content))


def save_later(
    training: Training,
    checkpoints: Path,
    step: int,
    about: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    after: Callable[[], None],
) -> Pending:
    """Copy a training to host memory and save it while the training goes on; see :func:`save`."""
    tensors, rest = _content(training)
    content = {"step": step, **_names(training), **about}
    part = _begin(checkpoints, step, tensors)

    def complete() -> None:
        _complete(part, rest, content)
        after()

    return Pending(part, write_later(tensors, part, group), complete)


def save_weights(training: Training, checkpoints: Path, about: Mapping[str, Any]) -> Path:
    """Save the weights alone as the checkpoint ``final``; see :func:`save`."""
    tensors, content = _model(training), {**_names(training), **about}
    part = _begin(checkpoints, None, tensors)
    with explained(part):
        write(tensors, part)
        return on_first(lambda: folder.complete(part, content))


def load(
    training: Training, checkpoint: Path, verify: bool = True, keep: Collection[str] = ()
) -> dict[str, Any]:
    """Continue a training from a checkpoint, under any layout; every rank has to call this."""
    manifest = _manifest(checkpoint, verify)
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


def load_weights(training: Training, checkpoint: Path, verify: bool = True) -> None:
    """Load the weights alone, to evaluate them; see :func:`load`."""
    _manifest(checkpoint, verify)
    fill(_model_slots(training), Folder(checkpoint))


def _manifest(checkpoint: Path, verify: bool) -> dict[str, Any]:
    read = folder.require_whole if verify else folder.manifest_of
    return on_first(lambda: read(checkpoint))


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
    rest["random"] = _joined(rest["random"])
    content = bytearray()
    on_first(lambda: content.extend(saved.packed(rest)))
    return _model(training) | saved.optimizer_tensors(training.optimizer), bytes(content)


def _values(training: Training) -> dict[str, Any]:
    """Return the state of a training besides its tensors, with the random states of this rank."""
    rest = training.state.state_dict(with_optimizers=False)
    return rest | {"optimizers": saved.optimizer_values(training.optimizer)}


def _begin(checkpoints: Path, step: int | None, tensors: Mapping[str, Tensor]) -> Path:
    """Make the folder that a checkpoint is written to, if the disk has space for it."""

    def work() -> Path:
        part = folder.begin(checkpoints, step)
        try:
            require_space(part, tensors)
        except OSError:
            part.rmdir()
            raise
        return part

    return on_first(work)


def _complete(part: Path, rest: bytes, about: dict[str, Any]) -> Path:
    (part / files.STATE).write_bytes(rest)
    return folder.complete(part, about)


def _names(training: Training) -> dict[str, Any]:
    """Return what an export needs to know besides the tensors."""
    names = training.model.names.items()
    return {
        "tied": {name: first for name, first in names if name != first},
        "criterion": list(_criterion(training)),
    }


def _model(training: Training) -> dict[str, Tensor]:
    """Return the parameters and buffers of model and criterion."""
    first = training.plugin.data_rank == 0
    return saved.model_tensors(training.model, with_buffers=first) | _criterion(training)


def _model_slots(training: Training) -> dict[str, list[Tensor]]:
    """Return the tensors of model and criterion to fill, by name."""
    criterion = {name: [tensor] for name, tensor in _criterion(training).items()}
    return saved.model_slots(training.model) | criterion


def _criterion(training: Training) -> dict[str, Tensor]:
    """Return the parameters and buffers of a criterion that is a module."""
    held = training.criterion.state_dict() if isinstance(training.criterion, nn.Module) else {}
    return {CRITERION + name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _joined(mine: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of all ranks in one dict."""
    if not several_ranks():
        return mine
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return {key: value for part in parts for key, value in part.items()}
