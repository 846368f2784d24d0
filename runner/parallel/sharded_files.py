"""Write tensors that lie on several ranks to safetensors files, and read them under any layout.

By :mod:`torch.distributed.checkpoint`: each rank writes its shards of DTensors, and one rank writes
each plain tensor. The files hold tensors only, so that nothing in them is run when they are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, dtype
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from runner.clip.shard import local
from runner.config.notation import first_few


class Stored(NamedTuple):
    """Shape of a whole tensor in the files, and its dtype."""

    shape: tuple[int, ...]
    dtype: dtype


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors to ``folder``; every rank has to call this.

    Args:
        tensors: tensors by name. A DTensor is written by all ranks of its mesh together. A plain
            tensor is the same on all ranks that give it, and one of them writes it.
        folder: folder that exists, on a disk that all ranks share.

    Raises:
        OSError: this or another rank could not write, on every rank.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    content = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _one_error():
        save(content, storage_writer=writer, no_dist=_alone())


def stored(folder: Path) -> dict[str, Stored]:
    """Return what the files of ``folder`` hold, by the names of the tensors."""
    known: dict[str, Any] = _reader(folder).read_metadata().state_dict_metadata
    return {name: Stored(tuple(one.size), one.properties.dtype) for name, one in known.items()}


@torch.no_grad()
def read(tensors: Mapping[str, Sequence[Tensor]], folder: Path) -> None:
    """Copy what the files of ``folder`` hold to ``tensors``; every rank has to call this.

    Args:
        tensors: by name the tensors to fill, whatever part of a whole tensor lies on this rank.
            Those of one name are alike.
        folder: folder that :func:`write` wrote.

    Raises:
        ValueError: the files lack a tensor, or hold it in another shape.
        OSError: a rank could not read, on every rank.
    """
    held = stored(folder)
    missing = [name for name in tensors if name not in held]
    if missing:
        raise ValueError(f"{folder} does not hold {first_few(missing)}")
    for name, (first, *_) in tensors.items():
        if held[name].shape != tuple(first.shape):
            raise ValueError(
                f"{name} has shape {list(held[name].shape)} in {folder} instead of "
                f"{list(first.shape)}"
            )
    content = {name: first.detach() for name, (first, *_) in tensors.items()}
    with _one_error():
        load(content, storage_reader=_reader(folder), no_dist=_alone())
    for first, *others in tensors.values():
        for other in others:
            local(other).copy_(local(first))


def _reader(folder: Path) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(folder))


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


@contextmanager
def _one_error() -> Iterator[None]:
    """Raise the first error of any rank as an OSError, and silence advice about process groups."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {type(first).__name__}: {first}") from first
