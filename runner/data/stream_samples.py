"""The samples of a stream, drawn with random numbers of their own and from any position."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from runner.data.order import OwnRandom, RandomState, seed_all, seed_for, unchanged

T = TypeVar("T")


class StreamSamples:
    """The samples of a stream, drawn with random numbers of their own."""

    def __init__(
        self, dataset: Any, purpose: str, position: Mapping[str, Any], alone: bool
    ) -> None:
        self._purpose = purpose
        self._alone = alone
        self._reads_again = loses_samples(dataset)
        self.continued = "state" in position and not self._reads_again
        if self.continued:
            self._random = OwnRandom(RandomState.of(position["random"]))
        else:
            self._random = OwnRandom.seeded(seed_for(purpose, 0, 0))
        self._iterator: Iterator[Any] = self._run(partial(self._begin, dataset, position))

    def _begin(self, dataset: Any, position: Mapping[str, Any]) -> Any:
        dataset_has_state = has_state(dataset)
        if self.continued and dataset_has_state:
            dataset.load_state_dict(position["state"])
        iterator: Any = iter(dataset)
        if self.continued and not dataset_has_state and has_state(iterator):
            iterator.load_state_dict(position["state"])
        self._stateful: Any = None
        if not self._reads_again:
            stateful = dataset if dataset_has_state else iterator
            self._stateful = stateful if has_state(stateful) else None
        return iterator

    def take(self, samples: int) -> list[Any]:
        """Return the next samples, fewer at the end of the stream."""
        return self._run(lambda: list(islice(self._iterator, samples)))

    def collated(self, collate: Callable[[list[Any]], T], group: list[Any], number: int) -> T:
        """Collate microbatch ``number``; what that draws depends on no other microbatch."""
        with unchanged({}), self._as_only_worker():
            seed_all(seed_for(f"collate {number}, {self._purpose}", 0, 0))
            return collate(group)

    def _run(self, work: Callable[[], T]) -> T:
        """Run ``work`` with the random numbers of the stream, and as its only worker."""
        with self._as_only_worker():
            return self._random.during(work)

    def _as_only_worker(self) -> AbstractContextManager[Any]:
        """Let ``get_worker_info()`` be None: a stream that divides itself by it is read whole."""
        return patch.object(torch_worker, "_worker_info", None) if self._alone else nullcontext()

    def position(self, batches: int) -> dict[str, Any]:
        """Return the position of the stream, after ``batches`` batches were read."""
        if self._stateful is None:
            return {"batches": batches}
        state = copy.deepcopy(self._stateful.state_dict())
        return {"batches": batches, "state": state, "random": self._random.state.state_dict()}


def has_state(of: Any) -> bool:
    """Return whether a position can be read from a stream, and given to it."""
    return all(callable(getattr(of, name, None)) for name in ("state_dict", "load_state_dict"))


def loses_samples(dataset: Any) -> bool:
    """Return whether the state of a stream leaves out samples that it has read but not yielded.

    A state of Hugging Face's ``datasets`` lacks the samples in a shuffle buffer. The buffer can be
    any stage of the stream.
    """
    stages = [dataset]
    seen = set[int]()
    while stages:
        stage = stages.pop()
        if isinstance(stage, list | tuple):
            stages += stage
        is_stage = type(stage).__module__.startswith("datasets.")
        if id(stage) in seen or not (is_stage or isinstance(stage, IterableDataset)):
            continue
        seen.add(id(stage))
        if type(stage).__name__ == "BufferShuffledExamplesIterable" and stage.buffer_size > 1:
            return True
        stages += getattr(stage, "__dict__", {}).values()
    return False


def checksum(batch: Any) -> int:
    """Return a checksum, at least 1, of the numbers and texts in a batch or a list of samples."""
    digest = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):
            content = leaf.tobytes()
        else:
            is_plain = isinstance(leaf, int | float | str | bytes)  # else it may print an address
            content = repr(leaf if is_plain else type(leaf)).encode()
        digest = zlib.crc32(content, digest)
    return digest % 2**20 + 1
