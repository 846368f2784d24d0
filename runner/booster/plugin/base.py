"""What a plugin is: how a model and its data are spread over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from runner.booster.optimizer import nothing
from runner.clip import Layout
from runner.data.dataset import collate_pairs
from runner.data.order import PartitionedBatches
from runner.parallel.pipeline import Pipeline

SHARD_BY_HAND = (
    "Let its __iter__ yield this rank's samples alone, itertools.islice(samples, plugin.data_rank, "
    "None, plugin.data_size), equally many on each rank (with num_workers, each worker yields its "
    "part of them), and hand it to torch.utils.data.DataLoader"
)
"""What to write for a data set without an index, under several data-parallel ranks."""


def require_process_group(plugin: str) -> None:
    """Refuse to go on alone.

    Raises:
        RuntimeError: there is no process group; the message says how to get one.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            f"{plugin} needs a process group: call runner.launch_from_torch() first, "
            "and start the script by torchrun"
        )


@dataclass(frozen=True)
class ParallelModel:
    """A model that was spread over ranks, and what an optimizer step has to do for it.

    Attributes:
        module: what to run instead of the model.
        layout: where its gradients live.
        sync_grads: makes gradients final. It is called on every rank, once a step, before gradients
            are read.
        broadcast_params: brings the new parameters to all ranks that use them, or frees unsharded
            copies that are stale. It is called on every rank after the optimizer has stepped.
        steps: ids of the parameters that this rank's optimizer steps; None for all.
        pipeline: runs a batch, where the model is cut into stages.
        renamed: the name of a parameter in the whole model, by another one that it has here.
    """

    module: nn.Module
    layout: Layout
    sync_grads: Callable[[], None] = nothing
    broadcast_params: Callable[[], None] = nothing
    steps: frozenset[int] | None = None
    pipeline: Pipeline | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


class Plugin(ABC):
    """How a model, its gradients and its data are spread over ranks."""

    reports_metrics: bool = True
    """Whether this rank's figures count among those of the data-parallel ranks. Of the ranks that
    read the same samples, the one that has the loss reports."""

    precision: str | None = None
    """What a :class:`~runner.Booster` computes in that is not told otherwise."""

    initial_scale: float | None = None
    """The fp16 scale that training begins with; None for the default one."""

    max_norm: float = 0.0
    """Above 0: a step limits the norm of a gradient that was not clipped before."""

    @classmethod
    def problems(
        cls, model: nn.Module, ranks: int, options: Mapping[str, Any]
    ) -> list[tuple[str, Any, str]]:
        """What will not work, before any rank starts.

        Args:
            model: the whole model, on any device (``meta`` too).
            ranks: in all.
            options: arguments of the constructor.

        Returns:
            Argument, its value, and what is wrong with it.
        """
        return []

    @property
    def rank(self) -> int:
        """This process, of all."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def data_rank(self) -> int:
        """Which part of a microbatch this rank reads."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Into how many parts a microbatch is dealt."""
        return self.world_size

    @abstractmethod
    def configure(self, model: nn.Module) -> ParallelModel:
        """Spread ``model`` over the ranks, in place."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Forward and backward passes inside leave gradients unsynchronised.

        Args:
            model: the ``module`` that :meth:`configure` returned.
        """

    def sum_over_data(self, figures: Sequence[float]) -> list[float]:
        """Sum over all data-parallel ranks, on the host; the same bits on each.

        One reduction of host memory (gloo), so that no accelerator is waited for.
        """
        mine = figures if self.reports_metrics else [0.0] * len(figures)
        buffer = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(buffer)
        return buffer.tolist()

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """A loader that gives this rank its part of every microbatch.

        Which samples make up a microbatch of all ranks depends on the seed, the epoch and the
        global batch alone.

        Args:
            dataset: map-style; one that answers ``__getitems__`` is read a batch at a time. An
                :class:`~torch.utils.data.IterableDataset` is taken where one data-parallel rank
                reads all of it; it has an order of its own.
            batch_size: samples of one microbatch on one data-parallel rank.
            shuffle: permute the samples, anew each epoch.
            seed: of the permutation.
            drop_last: leave out a last microbatch that is not full.
            num_workers: processes that read ahead.
            kwargs: further arguments of :class:`torch.utils.data.DataLoader`.

        Raises:
            TypeError: several data-parallel ranks cannot share an ``IterableDataset``.
        """
        kwargs.setdefault("collate_fn", collate_pairs)
        if isinstance(dataset, IterableDataset):
            if self.data_size > 1:
                raise TypeError(
                    f"{type(dataset).__name__} is an IterableDataset: each of {self.data_size} "
                    f"data-parallel ranks would read all of it. {SHARD_BY_HAND}"
                )
            kwargs |= {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
            return DataLoader(dataset, num_workers=num_workers, **kwargs)
        order = PartitionedBatches(
            len(dataset),  # type: ignore[arg-type]
            batch_size,
            rank=self.data_rank,
            world_size=self.data_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
        )
        return DataLoader(dataset, batch_sampler=order, num_workers=num_workers, **kwargs)
