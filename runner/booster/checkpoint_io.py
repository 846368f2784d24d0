"""Save and load models, optimizers and schedulers, under the names of Colossal-AI's Booster."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from runner.booster import saved
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.wrapper import ModelWrapper
from runner.config.notation import first_few
from runner.parallel.collectives import on_first
from runner.parallel.full_state_dict import gather
from runner.parallel.sharded_files import Folder, InMemory, write

_VALUES = "optimizer.pt"
"""File in the folder of a sharded optimizer that holds what is no tensor."""

_SAFETENSORS = ".safetensors"
_SHARDS = f"*{_SAFETENSORS}"


_DAMAGED = (OSError, RuntimeError, EOFError, pickle.UnpicklingError, safetensors.SafetensorError)
"""What torch and safetensors raise for a file that is cut off, or that holds something else."""


class CheckpointIO:
    """The methods of :class:`runner.Booster` that write and read files.

    Every rank has to call them, and all ranks have to see the same disk. Reading a file runs no
    code in it. What was saved under one plugin and number of ranks can be loaded under another.

    ``size_per_shard`` is accepted, since scripts of Colossal-AI give it: each rank writes one file.
    """

    def save_model(
        self,
        model: ModelWrapper,
        checkpoint: str | Path,
        shard: bool = False,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Save the weights of the model."""
        path = Path(checkpoint)
        if shard:
            _write_folder(path, saved.model_tensors(model), of_optimizer=False)
            return
        whole = saved.whole_model(model)
        if use_safetensors or path.suffix == _SAFETENSORS:
            # The format knows no tied tensors: each name gets its own.
            own = {name: tensor.clone() for name, tensor in whole.items()}
            _write_file(path, lambda part: safetensors.torch.save_file(own, part))
        else:
            _write_file(path, lambda part: torch.save(whole, part))

    def load_model(
        self,
        model: ModelWrapper,
        checkpoint: str | Path,
        strict: bool = True,
    ) -> None:
        """Load what :meth:`save_model` saved, or the state dict of a model that was not boosted."""
        path = Path(checkpoint)
        if path.is_dir():
            saved.load_model(model, Folder(path), missing=not strict)
            return
        held = _tensors(_read(path), path)
        if strict and (unknown := [name for name in held if name not in model.names]):
            raise ValueError(f"{path} holds {first_few(unknown)}, which the model does not have")
        saved.load_model(model, InMemory(held), missing=not strict)

    def save_optimizer(
        self,
        optimizer: OptimizerWrapper,
        checkpoint: str | Path,
        shard: bool = False,
    ) -> None:
        """Save the state of the optimizers and of the fp16 loss scale."""
        path = Path(checkpoint)
        tensors, values = saved.optimizer_tensors(optimizer), saved.optimizer_values(optimizer)
        if shard:
            _write_folder(path, tensors, of_optimizer=True)
            _write_file(path / _VALUES, lambda part: part.write_bytes(saved.packed(values)))
        else:
            whole = {"tensors": gather(tensors), **saved.plain(values)}
            _write_file(path, lambda part: torch.save(whole, part))

    def load_optimizer(
        self,
        optimizer: OptimizerWrapper,
        checkpoint: str | Path,
    ) -> None:
        """Load what :meth:`save_optimizer` saved."""
        path = Path(checkpoint)
        values = _read(path / _VALUES if path.is_dir() else path)
        if path.is_dir():
            saved.load_optimizer(optimizer, Folder(path), values)
        else:
            held = InMemory(_tensors(values.get("tensors"), path))
            saved.load_optimizer(optimizer, held, values)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Save the state of a scheduler to a file."""
        path = Path(checkpoint)
        state = lr_scheduler.state_dict()
        _write_file(path, lambda part: part.write_bytes(saved.packed(state)))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Load what :meth:`save_lr_scheduler` saved."""
        lr_scheduler.load_state_dict(_read(Path(checkpoint)))


def _write_folder(path: Path, tensors: Mapping[str, Tensor], *, of_optimizer: bool) -> None:
    """Write shards to a folder, in place of those that an earlier save has left there."""
    part = path / f".{'optimizer' if of_optimizer else 'model'}.part"

    def begin() -> None:
        if any(path.glob(_SHARDS)) and (path / _VALUES).exists() != of_optimizer:
            held = "a model" if of_optimizer else "an optimizer"
            raise ValueError(f"{path} holds {held}, which would be replaced: name another folder")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    def complete() -> None:
        written = [one.replace(path / one.name) for one in sorted(part.iterdir())]
        for one in {*path.glob(_SHARDS)} - {*written}:
            one.unlink()
        part.rmdir()

    on_first(begin)
    write(tensors, part)
    on_first(complete)


def _write_file(path: Path, save: Callable[[Path], object]) -> None:
    """Let the first rank write a file, beside the former one until it is complete."""
    part = path.with_name(f".{path.name}.part")

    def work() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(part)
            part.replace(path)
        except RuntimeError as error:  # torch's own writer, of a disk that is full
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    on_first(work)


def _read(path: Path) -> dict[str, Any]:
    """Return the dict in a file; no code in it is run."""
    try:
        if path.suffix == _SAFETENSORS or _is_safetensors(path):
            return dict(safetensors.torch.load_file(path))
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged, or no checkpoint: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return content


def _is_safetensors(path: Path) -> bool:
    """Return whether a file of any name begins as safetensors do: a length, then JSON."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _tensors(held: object, path: Path) -> dict[str, Tensor]:
    """Return ``held`` if it is a dict of tensors."""
    if not isinstance(held, dict) or not all(isinstance(one, Tensor) for one in held.values()):
        raise ValueError(f"{path} does not hold tensors by name")
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in held.items()}
