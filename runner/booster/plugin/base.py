"""The contract of a plugin, and ``single``: how a model and its data lie on ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from runner.data.dataset import collate_pairs
from runner.data.order import PartitionedBatches
from runner.data.samples import SeededSamples, is_in_memory
from runner.data.stream import StreamLoader
from runner.data.workers import Collate, WorkerLoader
from runner.gradients import Layout
from runner.gradients.transfer import start_gather
from runner.parallel.distribution import ParallelModel
from runner.parallel.hooks import watch_parameters

DTYPES = {None: None, "fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

Misfit = tuple[str, Any, str]
"""Argument of a plugin's constructor, its value, and why it does not fit the model or the ranks."""


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype of a forward pass under precision ``name``; None for full precision."""
    if name not in DTYPES:
        raise ValueError(f"unknown precision {name!r}: use {', '.join(filter(None, DTYPES))}")
    return DTYPES[name]


class Plugin(ABC):
    """How a model, its gradients and its data are distributed over ranks.

    Attributes:
        data_rank: data-parallel rank: which part of a microbatch this rank reads.
        data_size: data-parallel size: number of parts of a microbatch.
        reports_metrics: whether sums over data-parallel ranks include this rank. Among ranks that
            read the same samples, exactly one is included, and it has the loss.
        precision: precision of a :class:`~runner.Booster` that is given none.
        initial_scale: initial fp16 loss scale; None for the default one.
        max_norm: if above 0, each step clips the norm of a gradient that was not clipped before.
        device: device on which this rank trains; None: where the model lies.
        splits_model: True if each rank holds a part of the parameters only. Such a model may lie on
            the host, and only the values of the first rank are read.
    """

    data_rank: int = 0
    data_size: int = 1
    reports_metrics: bool = True
    precision: str | None = None
    initial_scale: float | None = None
    max_norm: float = 0.0
    device: torch.device | None = None
    splits_model: bool = False

    @classmethod
    def problems(cls, model: nn.Module, ranks: int, options: Mapping[str, Any]) -> Iterable[Misfit]:
        """Return what would not work, before any rank starts.

        Args:
            model: the whole model, on any device, including ``meta``.
            ranks: world size.
            options: arguments of the constructor.
        """
        return ()

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @abstractmethod
    def configure(self, model: nn.Module) -> ParallelModel:
        """Distribute ``model`` over the ranks, in place."""

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Sum values over all data-parallel ranks, with bitwise equal results on all ranks."""
        return self.sum_over_ranks(values if self.reports_metrics else [0.0] * len(values))

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sum values over all ranks, as :meth:`sum_over_data` does over data-parallel ones."""
        return self.start_sum_over_ranks(values)()

    def start_sum_over_ranks(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start :meth:`sum_over_ranks` on the host (gloo); return a function that waits."""
        if self.world_size == 1:
            return lambda: list(values)
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
            dataset: map-style data set, or a stream (:class:`~torch.utils.data.IterableDataset`),
                which has its own order, and is divided as :mod:`runner.data.stream` describes.
            batch_size: number of samples of one microbatch on one data-parallel rank.
            shuffle: whether to permute the samples in each epoch.
            seed: seed of the permutation.
            drop_last: whether to leave out a last microbatch that is not full.
            num_workers: number of worker processes, which live on from epoch to epoch.
            kwargs: further arguments of :class:`torch.utils.data.DataLoader`.
        """
        kwargs.setdefault("collate_fn", collate_pairs)
        kwargs.setdefault("pin_memory", torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        partition: dict[str, Any] = {
            "rank": self.data_rank,
            "world_size": self.data_size,
            "drop_last": drop_last,
            "seed": seed,
        }
        if isinstance(dataset, IterableDataset):
            if shuffle:
                raise ValueError(f"{type(dataset).__name__} has its own order: shuffle=False")
            return StreamLoader(dataset, batch_size, num_workers=num_workers, **partition, **kwargs)
        size = len(dataset)  # type: ignore[arg-type]
        order = PartitionedBatches(size, batch_size, shuffle=shuffle, **partition)
        kwargs |= {"batch_sampler": order, "num_workers": num_workers}
        if num_workers:
            return WorkerLoader(dataset, seed, **kwargs)
        kwargs["collate_fn"] = Collate(
            dataset, kwargs["collate_fn"], partial(getattr, order, "last")
        )
        samples = dataset if is_in_memory(dataset) else SeededSamples(dataset, seed)
        return DataLoader(samples, **kwargs)

    prepare_train_dataloader = prepare_dataloader  # its earlier name in Colossal-AI


class SinglePlugin(Plugin):
    """One process on one device, independent of any other rank."""

    rank = 0
    world_size = 1

    def configure(self, model: nn.Module) -> ParallelModel:
        """Return the model unchanged."""
        watch = partial(watch_parameters, model)
        return ParallelModel(Layout.of_model(model), watch_final=watch)
