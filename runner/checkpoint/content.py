"""What a checkpoint holds, and how all ranks write and read it together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.booster import ModelWrapper, OptimizerWrapper, Plugin, saved
from runner.booster.joint import CRITERION
from runner.checkpoint import folder
from runner.parallel.first_rank import on_first, several_ranks
from runner.parallel.sharded_files import Folder, Source, fill, write
from runner.run_folder import files


class Stateful(Protocol):
    """The training state besides model and optimizers."""

    def state_dict(self, with_optimizers: bool = True) -> dict[str, Any]:
        """Return the state; see :class:`runner.train.state.TrainState`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


class Training(Protocol):
    """What is saved: :class:`runner.Trainer` is one."""

    model: ModelWrapper
    optimizer: OptimizerWrapper
    criterion: Any
    plugin: Plugin

    @property
    def state(self) -> Stateful:
        """The rest of the state."""


def save(training: Training, checkpoints: Path, step: int, about: Mapping[str, Any]) -> Path:
    """Save a training between two steps; every rank has to call this.

    Args:
        training: the training.
        checkpoints: folder of all checkpoints of the run, on a disk that all ranks share.
        step: number of optimizer steps taken.
        about: what the manifest says of the checkpoint, such as its configuration.

    Returns:
        The checkpoint.

    Raises:
        OSError: a rank could not write, on every rank. Earlier checkpoints are unchanged.
    """
    rest = training.state.state_dict(with_optimizers=False)
    rest["random"] = _joined(rest["random"])
    rest["optimizers"] = saved.optimizer_values(training.optimizer)
    part = on_first(lambda: folder.begin(checkpoints, step))
    tensors = _model(training) | saved.optimizer_tensors(training.optimizer)
    write(tensors, part)

    def finish() -> Path:
        torch.save(rest, part / files.STATE)
        return folder.complete(part, {"step": step, **about})

    return on_first(finish)


def load(training: Training, checkpoint: Path) -> dict[str, Any]:
    """Continue a training from a checkpoint, under any layout; every rank has to call this.

    Args:
        training: a training of the same model, optimizers and clipping mode, before its first step.
        checkpoint: folder that :func:`save` returned.

    Returns:
        The manifest of the checkpoint.

    Raises:
        DamagedCheckpoint: the checkpoint is not whole. Nothing was loaded.
        ValueError: it is that of another training.
    """
    manifest = on_first(lambda: folder.require_whole(checkpoint))
    # No code in the file is run.
    rest = torch.load(checkpoint / files.STATE, map_location="cpu", weights_only=True)
    source = Folder(checkpoint)
    _load_model(training, source)
    saved.load_optimizer(training.optimizer, source, rest.pop("optimizers"))
    training.state.load_state_dict(rest)
    return manifest


def load_weights(training: Training, checkpoint: Path) -> None:
    """Load the weights alone, to evaluate them; see :func:`load`."""
    on_first(lambda: folder.require_whole(checkpoint))
    _load_model(training, Folder(checkpoint))


def _model(training: Training) -> dict[str, Tensor]:
    """Return the parameters and buffers of model and criterion.

    Buffers of data-parallel ranks may differ between steps: those of the first one are written, as
    the next forward pass would send them to the others.
    """
    first = training.plugin.data_rank == 0
    return saved.model_tensors(training.model, with_buffers=first) | _criterion(training)


def _load_model(training: Training, source: Source) -> None:
    saved.load_model(training.model, source)
    fill({name: [tensor] for name, tensor in _criterion(training).items()}, source)


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
