"""What a data factory returns; data sets of one's own, of tensors in memory, and random ones."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from runner.config.notation import plural
from runner.config.problem import ArgumentError, Suggesting
from runner.data.order import RandomState, generator_for, generators, set_epoch
from runner.data.samples import draws_nothing, place_of

IGNORED = -100
"""Targets with this value add nothing to the loss and are not counted as items: the default
`ignore_index` of `torch.nn.functional.cross_entropy`."""


Columns: TypeAlias = Sequence[str | Sequence[str]] | None
"""Columns of a table: first the columns of the inputs, of which several in brackets are one vector;
last the column of the targets. None: samples are dictionaries of all columns."""


class DataUnavailable(Suggesting):
    """Data is missing or cannot be read.

    Attributes:
        argument: the argument in section ``data`` that is wrong; "" if it is none alone.
        reason: what is wrong with it; the text of the exception names the argument before.
    """

    def __init__(self, reason: str, suggestion: str = "", *, argument: str = "") -> None:
        super().__init__(f"data.{argument}: {reason}" if argument else reason, suggestion)
        self.argument = argument
        self.reason = reason


_UNEQUAL = re.compile(r"equal size(?:, but got (\[.*?\]) at entry \d+ and (\[.*?\]))?")


class UnequalSamples(DataUnavailable, ValueError):
    """Samples that make no batch, as their tensors have different shapes."""


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


def first_samples(dataset: Dataset[Any]) -> list[Any]:
    """Return the first two samples of a data set that is not empty; a stream is begun for them.

    The only sample of a data set is returned twice.
    """
    if not isinstance(dataset, IterableDataset):
        samples = []
        for index in (0, min(1, len(dataset) - 1)):  # type: ignore[arg-type]
            try:
                samples.append(dataset[index])
            except Exception as error:
                error.add_note(f"while {place_of(dataset, [index])} was read")
                raise
        return samples
    drawn = RandomState.now(generators(dataset))
    try:
        samples = list(islice(dataset, 2))
    finally:
        drawn.restore(generators(dataset))
    if not samples:
        raise DataUnavailable(f"{type(dataset).__name__} yields no sample")
    return [samples[0], samples[-1]]


def targets_in_memory(dataset: Any) -> Tensor | None:
    """Return the targets of a data set that holds them as whole numbers; None of others.

    Each number may be there once, in any order.
    """
    if isinstance(dataset, Subset):
        targets = targets_in_memory(dataset.dataset)
        if targets is None or len(targets) != len(dataset.dataset):  # type: ignore[arg-type]
            return targets
        return targets[torch.as_tensor(dataset.indices)]
    targets = None
    if isinstance(dataset, _Pairs):
        targets = dataset.different_targets()
    elif isinstance(dataset, TensorDataset) and dataset.tensors:
        targets = dataset.tensors[-1]
    return None if targets is None or targets.is_floating_point() else targets


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
        self.inputs = inputs
        self.targets = targets

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return tuple(tensor.index_select(0, chosen) for tensor in self.tensors)


def collate_pairs(batch: Any) -> Any:
    """Collate a list of samples; return a batch that `__getitems__` has collated unchanged."""
    if not isinstance(batch, list):
        return batch
    first = batch[0]
    try:
        if is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in fields(first)]
            columns = {name: [getattr(sample, name) for sample in batch] for name in names}
            batches = {name: default_collate(column) for name, column in columns.items()}
            return type(first)(**batches)
        return default_collate(batch)
    except RuntimeError as error:
        unequal = _UNEQUAL.search(str(error))
        if unequal is None:
            raise
        shapes = f" ({unequal[1]} and {unequal[2]})" if unequal[1] else ""
        raise UnequalSamples(
            f"samples have different lengths{shapes}: data.collate=mine.pad names a function of a "
            "list of samples that pads them (the collate_fn of a DataLoader)"
        ) from None


def own(
    train: Any,
    eval: Any = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
    items: Literal["samples", "tokens"] = "samples",
    tokens_per_sample: int | None = None,
    columns: Columns = None,
) -> Data:
    """Train on one data set, evaluate on another or on a share of it; see conf/data/own.yaml."""
    if not 0 <= eval_fraction < 1:
        raise ArgumentError("eval_fraction", f"{eval_fraction} must be at least 0 and below 1")
    _require_dataset("data.train", train)
    if eval is not None:
        _require_dataset("data.eval", eval)
    train, eval = _tensors(train, eval, columns)
    if eval is None and eval_fraction > 0 and not isinstance(train, IterableDataset):
        kept, held_out = split_off(len(train), eval_fraction, seed)
        eval = _Part(train, held_out.tolist())
        train = _Part(train, kept.tolist())
    return Data(train, eval, items, tokens_per_sample)


def _require_dataset(key: str, value: Any) -> None:
    if not is_dataset(value):
        kind = type(value).__name__
        needed = "a data set has __len__ and __getitem__, or is an IterableDataset"
        raise DataUnavailable(f"{key} is of class {kind}, which is no data set: {needed}")


def split_off(samples: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of samples to train on, and of a random share that is held out."""
    if not 0 <= fraction < 1:
        raise ArgumentError("eval_fraction", f"{fraction} must be at least 0 and below 1")
    held_out = max(1, round(fraction * samples)) if fraction > 0 else 0
    if held_out >= samples:
        whole = plural(samples, "sample")
        raise ArgumentError("eval_fraction", f"{fraction} leaves none of {whole} to train on")
    chosen = torch.randperm(samples, generator=generator_for("held out", seed, 0))
    return chosen[held_out:].sort().values, chosen[:held_out].sort().values


class _Part(Subset[Any]):
    @property
    def draws_nothing(self) -> bool:
        return draws_nothing(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch)


def _tensors(train: Any, eval: Any, columns: Columns) -> tuple[Any, Any]:
    """Let tables of Hugging Face's ``datasets`` read tensors; return other data sets unchanged."""
    names: list[str] | None = None  # of the classes, if the targets of the training data are text
    tables = []
    for table in (train, eval):
        if not callable(getattr(table, "with_format", None)):
            tables.append(table)
            continue
        if isinstance(table, Mapping):
            raise ValueError(f"these are several tables: choose a split of {', '.join(table)}")
        if columns is None:
            tables.append(table.with_format("torch"))
            continue
        if len(columns) < 2 or not isinstance(columns[-1], str):
            problem = "needs the columns of the inputs, and last the column of the targets"
            raise ArgumentError("columns", problem)
        if table is train:
            names = _class_names(table, columns[-1])
        tables.append(_Pairs(table, columns, names))
    return tables[0], tables[1]


def _class_names(table: Any, target: str) -> list[str] | None:
    """Return the different texts of the targets, in their order; None if they are no text."""
    features = getattr(table, "features", None) or {}
    if isinstance(table, IterableDataset) or not _is_text(features.get(target)):
        return None
    texts = table.unique(target)
    if None in texts:
        raise ValueError(f"column {target} has rows without a value: fill them, or leave them out")
    return sorted(texts)


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


class _Pairs(Dataset[tuple[Any, ...]]):
    """Rows of a table as (input, ..., target), with several columns in one input as a vector."""

    draws_nothing = True

    def __init__(
        self, table: Any, columns: Sequence[str | Sequence[str]], classes: Sequence[str] | None
    ) -> None:
        self.columns = columns
        self.numbers: dict[str, int] | None = None  # of the classes that targets name
        inputs: list[str] = []
        for column in columns[:-1]:
            inputs += [column] if isinstance(column, str) else column
        target = str(columns[-1])
        for name in (*inputs, target):
            self._require_numbers(table, name, is_class=name == target and classes is not None)
        if classes is not None:
            self.numbers = {name: number for number, name in enumerate(classes)}
            strange = sorted(set(map(str, table.unique(target))) - set(classes))
            if strange:
                text = f"class {strange[0]} of the held-out samples does not occur in training"
                raise ValueError(text)
        self.table = table.with_format("torch", columns=[*inputs, target])

    def _require_numbers(self, table: Any, name: str, is_class: bool) -> None:
        """Refuse text, and cells without a value, as far as the table tells."""
        features = getattr(table, "features", None) or {}
        if _is_text(features.get(name)) and not is_class:
            text = f"column {name} holds text: choose columns of numbers, or make numbers of it"
            raise ValueError(f"{text} (table.map)")
        content = getattr(table, "data", None)
        if name in features and content is not None and content.column(name).null_count:
            text = f"column {name} has rows without a value: fill them, or leave them out"
            raise ValueError(text)

    def different_targets(self) -> Tensor | None:
        """Return each number in the column of the targets once; None if it holds no numbers."""
        if self.numbers is not None:
            return torch.arange(len(self.numbers))
        target = str(self.columns[-1])
        features = getattr(self.table, "features", None) or {}
        if not getattr(features.get(target), "dtype", "").startswith("int"):
            return None
        return torch.tensor(self.table.unique(target))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        rows = self.table.__getitems__(list(indices))
        samples = []
        for row in rows:
            inputs = [self._value(row, column) for column in self.columns[:-1]]
            target = row[self.columns[-1]]
            samples.append((*inputs, target if self.numbers is None else self.numbers[target]))
        return samples

    def _value(self, row: Mapping[str, Any], column: str | Sequence[str]) -> Any:
        if isinstance(column, str):
            return row[column]
        return torch.stack([torch.as_tensor(row[name], dtype=torch.float32) for name in column])


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
        raise ArgumentError("kind", f"{kind!r} must be images, vectors or tokens")
    if min(samples, test_samples) < 1:
        raise ArgumentError(
            "samples", f"{samples} and test_samples {test_samples} must be at least 1"
        )
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
        raise ArgumentError(
            "shape",
            f"{list(shape)}, num_classes {num_classes}, sequence_length {sequence_length} "
            f"and vocabulary {vocabulary} must be at least 1, and ignored_fraction "
            f"{ignored_fraction} at least 0 and below 1, or 0 without tokens",
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
