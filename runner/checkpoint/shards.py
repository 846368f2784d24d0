"""Tensors in safetensors files, which all ranks write and read together.

By :mod:`torch.distributed.checkpoint` each rank writes its shards of DTensors, and one rank each
plain tensor. Files hold tensors only, so that nothing in them is run.
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
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import hf_storage, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from runner.config.notation import first_few
from runner.config.reading import opened
from runner.gradients.shard import local
from runner.parallel.collectives import several_ranks

_ADVICE = "torch.distributed is disabled"  # torch warns where one process saves


class Stored(NamedTuple):
    """The shape and the type of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors to ``folder``; every rank has to call this."""
    content, writer = _content(tensors, folder)
    with one_error():
        state_dict_saver.save(content, storage_writer=writer, no_dist=not several_ranks())


def _content(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Any], Any]:
    content = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return content, hf_storage.HuggingFaceStorageWriter(str(folder), save_distributed=True)


def write_later(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> Future[Any]:
    """Copy tensors to host memory, and write them in a thread; see :func:`write`."""
    content, writer = _content(tensors, folder)
    # The thread reads host memory: a stream of its own would be one of the first GPU.
    writer.per_thread_copy_ahead = 0
    # For the thread: catch_warnings in one thread would change the warnings of all threads.
    warnings.filterwarnings("ignore", _ADVICE)
    options: dict[str, Any] = {"process_group": group, "no_dist": not several_ranks()}
    written = state_dict_saver.async_save(content, storage_writer=writer, **options)
    assert isinstance(written, Future)
    return written


class Folder:
    """Whole tensors by name that :func:`write` wrote, which each rank reads its part of."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Shape and type of each tensor; a ValueError says that files cannot be read."""
        try:
            for file in Path(self._path).glob("*.safetensors"):
                opened(file).close()
                with safe_open(file, "pt"):  # it checks names, shapes and sizes
                    pass
            metadata = hf_storage.HuggingFaceStorageReader(self._path).read_metadata()
        except Exception as error:  # torch reads the header of a file as it comes
            kind = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{self._path} holds no safetensors that can be read ({kind})"
            ) from error
        tensors: dict[str, Any] = metadata.state_dict_metadata
        return {name: Stored(tuple(t.size), t.properties.dtype) for name, t in tensors.items()}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Fill copies of tensors; ValueError if one is not there in this shape; a collective."""
        stored = self.stored
        missing = [name for name in tensors if name not in stored]
        if missing:
            raise ValueError(f"what is loaded does not hold {first_few(missing)}")
        for name, (tensor, *_) in tensors.items():
            if stored[name].shape != tuple(tensor.shape):
                raise ValueError(
                    f"{name} has shape {list(stored[name].shape)} where it is stored, but "
                    f"{list(tensor.shape)} here"
                )
        content = {name: first.detach() for name, (first, *_) in tensors.items()}
        reader = hf_storage.HuggingFaceStorageReader(self._path)
        with one_error():
            state_dict_loader.load(content, storage_reader=reader, no_dist=not several_ranks())
        for first, *copies in tensors.values():
            for copy in copies:
                local(copy).copy_(local(first))


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
