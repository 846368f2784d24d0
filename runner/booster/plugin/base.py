"""Base class of plugins: how a model and its data are distributed over ranks."""

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

from runner.clip import Layout, Number, transfer
from runner.clip.transfer import start_gather
from runner.data.dataset import collate_pairs
from runner.data.order import PartitionedBatches
from runner.data.stream import StreamLoader
from runner.data.workers import WorkerLoader
from runner.parallel.final_gradients import Final
from runner.parallel.gradient_sync import nothing
from runner.parallel.pipeline import Pipeline

SHARD_BY_HAND = (
    "Let its __iter__ yield this rank's samples alone, itertools.islice(samples, plugin.data_rank, "
    "None, plugin.data_size), equally many on each rank (with num_workers, each worker yields its "
    "part of them), and hand it to torch.utils.data.DataLoader"
)
"""How to shard a data set without an index over data-parallel ranks."""


Misfit = tuple[str, Any, str]
"""Argument of a plugin's constructor, its value, and why it does not fit the model or the ranks."""


def require_process_group(plugin: str) -> dist.ProcessGroup:
    """Return the process group of all ranks.

    Raises:
        RuntimeError: there is none; the message says how to start one.
    """
    if dist.group.WORLD is None:
        raise RuntimeError(
            f"{plugin} needs a process group: call runner.launch_from_torch() first, "
            "and start the script by torchrun"
        )
    return dist.group.WORLD


@dataclass(frozen=True)
class ParallelModel:
    """A model that is distributed over ranks, and what an optimizer step does for it.

    Attributes:
        module: module to run instead of the model.
        layout: placement of the gradients.
        sync_grads: function that makes gradients final; called on every rank, once per step, before
            gradients are read.
        broadcast_params: function that brings new parameters to all ranks that use them, or frees
            stale unsharded copies; called on every rank after the optimizer has stepped.
        steps: ids of the parameters that the optimizer of this rank steps; None for all.
        pipeline: pipeline that runs batches, if the model is split into stages.
        renamed: name in the whole model of each parameter that has another name on this rank.
        watch_final: function that calls another one with parameters whose gradients have become
            final in a backward pass, see :mod:`runner.parallel.final_gradients`; None if they are
            final only after it.
    """

    module: nn.Module
    layout: Layout
    sync_grads: Callable[[], None] = nothing
    broadcast_params: Callable[[], None] = nothing
    steps: frozenset[int] | None = None
    pipeline: Pipeline | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    watch_final: Callable[[Final], None] | None = None


class Plugin(ABC):
    """How a model, its gradients and its data are distributed over ranks."""

    reports_metrics: bool = True
    """Whether sums over data-parallel ranks include this rank. Among ranks that read the same
    samples, exactly one is included, and it has the loss."""

    precision: str | None = None
    """Precision of a :class:`~runner.Booster` that is given none."""

    initial_scale: float | None = None
    """Initial fp16 loss scale; None for the default one."""

    max_norm: float = 0.0
    """If above 0, each step clips the norm of a gradient that was not clipped before."""

    @classmethod
    def problems(cls, model: nn.Module, ranks: int, options: Mapping[str, Any]) -> list[Misfit]:
        """Return what would not work, before any rank starts.

        Args:
            model: the whole model, on any device, including ``meta``.
            ranks: world size.
            options: arguments of the constructor.
        """
        return []

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def data_rank(self) -> int:
        """Data-parallel rank: which part of a microbatch this rank reads."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Data-parallel size: number of parts of a microbatch."""
        return self.world_size

    @abstractmethod
    def configure(self, model: nn.Module) -> ParallelModel:
        """Distribute ``model`` over the ranks, in place."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not synchronise gradients.

        Args:
            model: ``module`` of what :meth:`configure` returned.
        """

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Sum values over all data-parallel ranks, with bitwise equal results on all ranks.

        On the host (gloo), so that no accelerator is waited for.
        """
        mine = values if self.reports_metrics else [0.0] * len(values)
        return self.sum_over_ranks(mine)

    def start_mean_over_data(self, value: Number, device: torch.device) -> Callable[[], Number]:
        """Start the mean of a value over the data-parallel ranks, without waiting for ``device``.

        One collective of 8 bytes of each rank, none where there is one rank.

        Args:
            value: this rank's value; read only where :attr:`reports_metrics` is set.
            device: where the collective runs.

        Returns:
            A function that returns the mean, the same bits on every rank: a float where the host
            can read ``device``, else a 0-dimensional tensor.
        """
        if self.world_size == 1:
            return lambda: value
        mine = value if self.reports_metrics else 0.0
        rows = start_gather(transfer.on_device([mine], device), None)
        return lambda: transfer.read(rows().sum() / self.data_size)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sum values over all ranks, as :meth:`sum_over_data` does over data-parallel ones."""
        return self.start_sum_over_ranks(values)()

    def start_sum_over_ranks(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start :meth:`sum_over_ranks`; return a function that waits for the sums."""
        rows = start_gather(torch.tensor(values, dtype=torch.float64), None)
        return lambda: rows().sum(0).tolist()

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
        """Return a loader of this rank's part of every microbatch.

        The samples of a microbatch over all ranks depend only on the seed, the epoch and the
        global batch size.

        Args:
            dataset: map-style data set; one with ``__getitems__`` is read a batch at a time. An
                :class:`~torch.utils.data.IterableDataset` has its own order, and is divided over
                ranks and workers, see :mod:`runner.data.stream`.
            batch_size: number of samples of one microbatch on one data-parallel rank.
            shuffle: whether to permute the samples in each epoch.
            seed: seed of the permutation.
            drop_last: whether to leave out a last microbatch that is not full.
            num_workers: number of worker processes, which live on from epoch to epoch, see
                :mod:`runner.data.workers`.
            kwargs: further arguments of :class:`torch.utils.data.DataLoader`. ``pin_memory`` is on
                by default in a process that uses a GPU: copies then overlap with its work.

        Raises:
            ValueError: an ``IterableDataset`` cannot be shuffled.
        """
        kwargs.setdefault("collate_fn", collate_pairs)
        kwargs.setdefault("pin_memory", torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        if isinstance(dataset, IterableDataset):
            if shuffle:
                raise ValueError(f"{type(dataset).__name__} has its own order: shuffle=False")
            return StreamLoader(
                dataset,
                batch_size,
                rank=self.data_rank,
                world_size=self.data_size,
                drop_last=drop_last,
                seed=seed,
                num_workers=num_workers,
                **kwargs,
            )
        order = PartitionedBatches(
            len(dataset),  # type: ignore[arg-type]
            batch_size,
            rank=self.data_rank,
            world_size=self.data_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
        )
        kwargs |= {"batch_sampler": order, "num_workers": num_workers}
        if num_workers:
            return WorkerLoader(dataset, seed, **kwargs)
        return DataLoader(dataset, **kwargs)

    def prepare_train_dataloader(
        self, dataset: Dataset[Any], batch_size: int, **kwargs: Any
    ) -> DataLoader[Any]:
        """Return :meth:`prepare_dataloader`, whose earlier name in Colossal-AI this is."""
        return self.prepare_dataloader(dataset, batch_size, **kwargs)
