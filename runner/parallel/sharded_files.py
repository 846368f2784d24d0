"""Write tensors that lie on several ranks to safetensors files, and read them under any layout.

By :mod:`torch.distributed.checkpoint`: each rank writes its shards of DTensors, and one rank writes
each plain tensor. The files hold tensors only, so that nothing in them is run when they are read.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from runner.clip.shard import local
from runner.config.notation import first_few
from runner.parallel.collectives import several_ranks

_ADVICE = "torch.distributed is disabled"
"""Start of a warning of torch's where one process saves."""


class Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors to ``folder``; every rank has to call this."""
    content, writer = _content(tensors, folder)
    with one_error():
        save(content, storage_writer=writer, no_dist=not several_ranks())


def _content(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Any], Any]:
    content = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return content, HuggingFaceStorageWriter(str(folder), save_distributed=True)


def write_later(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> Future[Any]:
    """Copy tensors to host memory, and write them in a thread; see :func:`write`."""
    content, writer = _content(tensors, folder)
    # The thread reads host memory: a stream of its own would be one of the first GPU.
    writer.per_thread_copy_ahead = 0
    # For the thread: catch_warnings of one thread would change those of all.
    warnings.filterwarnings("ignore", _ADVICE)
    options: dict[str, Any] = {"process_group": group, "no_dist": not several_ranks()}
    written = async_save(content, storage_writer=writer, **options)
    assert isinstance(written, Future)
    return written


class Folder:
    """Whole tensors by name that :func:`write` wrote, which each rank reads its part of."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        try:
            metadata = HuggingFaceStorageReader(self._path).read_metadata()
        except Exception as error:  # torch reads the header of a file as it comes
            kind = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{self._path} holds no safetensors that can be read ({kind})"
            ) from error
        held: dict[str, Any] = metadata.state_dict_metadata
        return {name: Stored(tuple(one.size), one.properties.dtype) for name, one in held.items()}

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Fill copies of tensors, which are stored in the same shape; every rank calls this."""
        content = {name: first.detach() for name, (first, *_) in tensors.items()}
        reader = HuggingFaceStorageReader(self._path)
        with one_error():
            load(content, storage_reader=reader, no_dist=not several_ranks())
        for first, *others in tensors.values():
            for other in others:
                local(other).copy_(local(first))


def fill(tensors: Mapping[str, Sequence[Tensor]], source: Folder) -> None:
    """Fill ``tensors`` from ``source``; ValueError if it lacks one, or has another shape of it."""
    held = source.stored
    if missing := [name for name in tensors if name not in held]:
        raise ValueError(f"what is loaded does not hold {first_few(missing)}")
    for name, (tensor, *_) in tensors.items():
        if held[name].shape != tuple(tensor.shape):
            raise ValueError(
                f"{name} has shape {list(held[name].shape)} where it is stored, but "
                f"{list(tensor.shape)} here"
            )
    source.read(tensors)


@contextmanager
def one_error() -> Iterator[None]:
    """Raise the first error of any rank as an OSError, and silence advice about process groups."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ADVICE)
            yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        number = first.errno if isinstance(first, OSError) else None
        raise OSError(
            number or errno.EIO, f"rank {rank}: {type(first).__name__}: {first}"
        ) from first
