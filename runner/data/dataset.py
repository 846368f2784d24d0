"""What a data factory returns; data sets of one's own, of tensors in memory, and random ones."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from runner.data.order import RandomState, generator_for, generators, set_epoch
from runner.data.samples import draws_nothing, place_of

IGNORED = -100
"""Targets with this value add nothing to the loss and are not counted as items: the default
`ignore_index` of `torch.nn.functional.cross_entropy`."""


class DataUnavailable(Exception):
    """Data is missing or cannot be read."""


@dataclass(frozen=True)
class Data:
    """The training and test data of one run."""

    train: Dataset[Any]
    test: Dataset[Any] | None
    """Held-out samples, which `train` lacks; None if the run does not evaluate."""
    items: Literal["samples", "tokens"]
    """What the loss of a step is averaged over; tokens whose target is `IGNORED` do not count."""
    tokens_per_sample: int | None = None
    """Number of tokens in one sample, for durations in tokens; None for data without tokens."""


def length_of(dataset: Dataset[Any]) -> int | None:
    """Return the number of samples of a data set; None for a stream, whose end alone tells it."""
    if isinstance(dataset, IterableDataset):
        return None
    return len(dataset)  # type: ignore[arg-type]


def is_dataset(made: Any) -> bool:
    """Return whether a loader can read an object: by index and length, or as a stream."""
    return isinstance(made, IterableDataset) or (
        hasattr(made, "__getitem__") and hasattr(made, "__len__")
    )


def first_sample(dataset: Dataset[Any]) -> Any:
    """Return the first sample of a data set that is not empty; a stream is begun for it."""
    if not isinstance(dataset, IterableDataset):
        try:
            return dataset[0]
        except Exception as error:
            error.add_note(f"while {place_of(dataset, [0])} was read")
            raise
    drawn = RandomState.now(generators(dataset))
    try:
        return next(iter(dataset))
    except StopIteration:
        raise DataUnavailable(f"{type(dataset).__name__} yields no sample") from None
    finally:
        drawn.restore(generators(dataset))


def data_folder(root: str | None, advice: str) -> Path:
    """Return the folder `root`, or the one that `$DATA` names."""
    folder = root or os.environ.get("DATA")
    if not folder:
        raise DataUnavailable(f"data.root is not set, and neither is $DATA. {advice}")
    return Path(folder).expanduser()


class TensorPairs(TensorDataset):
    """Inputs and targets in memory; a batch takes one index operation for each."""

    draws_nothing = True

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__(inputs, targets)
        self.inputs, self.targets = inputs, targets

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return tuple(each.index_select(0, chosen) for each in self.tensors)


def collate_pairs(batch: Any) -> Any:
    """Collate a list of samples; return a batch that `__getitems__` has collated unchanged."""
    if not isinstance(batch, list):
        return batch
    first = batch[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        return type(first)(**{n: default_collate([getattr(s, n) for s in batch]) for n in names})
    return default_collate(batch)


def own(
    train: Any,
    eval: Any = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
    items: Literal["samples", "tokens"] = "samples",
    tokens_per_sample: int | None = None,
    columns: Sequence[str] | None = None,
) -> Data:
    """Train on one data set, evaluate on another or on a share of it; see conf/data/own.yaml."""
    if not 0 <= eval_fraction < 1:
        raise ValueError(f"eval_fraction {eval_fraction} must be at least 0 and below 1")
    for key, made in (("data.train", train), ("data.eval", eval)):
        if not (is_dataset(made) or (made is None and key == "data.eval")):
            kind = type(made).__name__
            needed = "a data set has __len__ and __getitem__, or is an IterableDataset"
            raise DataUnavailable(f"{key} is of class {kind}, which is no data set: {needed}")
    train, eval = (_tensors(one, columns) for one in (train, eval))
    if eval is None and eval_fraction > 0 and not isinstance(train, IterableDataset):
        samples = len(train)
        held_out = max(1, round(eval_fraction * samples))
        if held_out >= samples:
            raise ValueError(
                f"eval_fraction {eval_fraction} leaves none of {samples} samples to train on"
            )
        chosen = torch.randperm(samples, generator=generator_for("held out", seed, 0))
        parts = (chosen[held_out:], chosen[:held_out])
        train, eval = (_Part(train, part.sort().values.tolist()) for part in parts)
    return Data(train, eval, items, tokens_per_sample)


class _Part(Subset[Any]):
    @property
    def draws_nothing(self) -> bool:
        return draws_nothing(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch)


def _tensors(table: Any, columns: Sequence[str] | None) -> Any:
    """Let a table of Hugging Face's ``datasets`` read tensors; return other data sets unchanged."""
    if not callable(getattr(table, "with_format", None)):
        return table
    if isinstance(table, Mapping):
        raise ValueError(f"these are several tables: choose a split of {', '.join(table)}")
    if columns is None:
        return table.with_format("torch")
    return _Pairs(table.with_format("torch", columns=list(columns)), columns)


class _Pairs(Dataset[tuple[Any, Any]]):
    draws_nothing = True

    def __init__(self, table: Any, columns: Sequence[str]) -> None:
        self.table, (self.inputs, self.targets) = table, columns

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        rows = self.table.__getitems__(list(indices))
        return [(row[self.inputs], row[self.targets]) for row in rows]


SUCCESSORS = 4  # equally likely successors of a token: the lowest possible loss is log(4)


def synthetic(
    kind: Literal["images", "vectors", "tokens"],
    samples: int,
    test_samples: int,
    seed: int,
    **sizes: Any,
) -> Data:
    """Make seeded random inputs with targets from a fixed random teacher.

    ``sizes`` are the ``shape`` of a sample and ``num_classes``; of tokens ``sequence_length``,
    ``vocabulary`` and ``ignored_fraction``, the share of targets that do not count.
    """
    if kind not in ("images", "vectors", "tokens"):
        raise ValueError(f"kind {kind!r} must be images, vectors or tokens")
    if min(samples, test_samples) < 1:
        raise ValueError(f"samples {samples} and test_samples {test_samples} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = _made(kind, samples + test_samples, generator, **sizes)
    train = TensorPairs(inputs[:samples], targets[:samples])
    test = TensorPairs(inputs[samples:], targets[samples:])
    if kind == "tokens":
        return Data(train, test, "tokens", sizes["sequence_length"])
    return Data(train, test, "samples")


def _made(
    kind: str,
    count: int,
    generator: torch.Generator,
    shape: Sequence[int] = (1,),
    num_classes: int = 1,
    sequence_length: int = 1,
    vocabulary: int = 1,
    ignored_fraction: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return float32 [count, *shape] and int64 [count], or tokens and next ones [count, length]."""
    fits = 0 <= ignored_fraction < 1 if kind == "tokens" else ignored_fraction == 0
    if min(*shape, num_classes, sequence_length, vocabulary) < 1 or not fits:
        raise ValueError(
            f"shape {list(shape)}, num_classes {num_classes}, sequence_length {sequence_length} "
            f"and vocabulary {vocabulary} must be at least 1, and ignored_fraction "
            f"{ignored_fraction} at least 0 and below 1, or 0 without tokens"
        )
    if kind != "tokens":
        inputs = torch.randn(count, *shape, generator=generator)
        flat = inputs.flatten(1)
        teacher = torch.randn(flat.shape[1], num_classes, generator=generator)
        return inputs, (flat @ teacher).argmax(dim=1)
    successors = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=generator)
    turns = torch.randint(SUCCESSORS, (sequence_length, count), generator=generator)
    steps = [torch.randint(vocabulary, (count,), generator=generator)]
    for turn in turns:
        steps.append(successors[steps[-1], turn])
    walk = torch.stack(steps, dim=1)
    targets = walk[:, 1:].clone()
    if ignored_fraction:
        targets[torch.rand(targets.shape, generator=generator) < ignored_fraction] = IGNORED
    return walk[:, :-1].contiguous(), targets
