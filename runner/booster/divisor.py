"""Ways to count the items of a batch, which the mean of a loss may divide by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from runner.booster.batch import batch_size, named_parts, targets_of
from runner.booster.terms import TorchLoss
from runner.data.dataset import IGNORED

Name = tuple[str | int, ...]
"""Where a batch holds a tensor: keys of dictionaries and positions in tuples."""

SAMPLES, NOTHING, LABELS = "samples", "nothing", "labels that are not ignored"
_POSITIONS = "positions in the inputs"
_OTHER = "values that are not"
_ALL = "values"
_COUNTED: Mapping[str, Callable[[Any, float], Any]] = {
    # A negative label is no class: whoever does not ignore it by its number selects the others.
    LABELS: lambda values, ignored: (values != ignored) & (values >= 0),
    _OTHER: lambda values, ignored: values != ignored,
    "values that are not NaN": lambda values, _: values == values,
    "values of 0 or more": lambda values, _: values >= 0,
    "values above 0": lambda values, _: values > 0,
    "values of 0": lambda values, _: values == 0,
}
_SUM = "sum of values"
_IGNORED_CLASSES = (-100, -1, 0, 1, 2, 3, 255)
_IGNORED_NUMBERS = (-9999, -999, -100, -1, 0)
_NUMBERS = np.arange(-101, 257)  # more than those that a way to count leaves out
LARGEST_INPUT = 1 << 20  # elements of an input that is no target, to save time


class Divisor(NamedTuple):
    """A way to count the items of a batch.

    Attributes:
        counts: ``SAMPLES``, ``NOTHING`` (the loss is a sum), or what is counted in ``name``.
        name: the tensor that is counted; empty for the targets of the batch.
        ignored: value that is not counted.
        shifts: whether the first value of each sequence is left out.
        mask: tensor that says which values count; empty if all do.
        weight: weight of each class, whose sum a mean divides by; None for the number of labels.
    """

    counts: str
    name: Name = ()
    ignored: float = IGNORED
    shifts: bool = False
    mask: Name = ()
    weight: Tensor | None = None

    def items(self, batch: Any) -> float:
        """Count the items of a batch: its samples, if it lacks the tensor that is counted."""
        if self.counts == NOTHING:
            return 1.0
        inside = positions_inside(batch) if self.counts == _POSITIONS else None
        if inside is not None:
            return inside[0]
        tensor = tensor_of(batch, self.name)
        if self.counts == SAMPLES or tensor is None:
            return batch_size(batch)
        mask = tensor_of(batch, self.mask) if self.mask else None
        if mask is not None and mask.shape != tensor.shape:
            mask = None
        if self.shifts:
            tensor = tensor[..., 1:]
            mask = None if mask is None else mask[..., 1:]
        if self.counts == _ALL:
            return tensor.numel() if mask is None else _number_of(_array(mask) != 0)
        return self._counted(_array(tensor), None if mask is None else _array(mask) != 0)

    def _counted(self, values: Any, mask: Any) -> float:
        """Count values, a tensor or an array, where ``mask`` is set."""
        if self.counts == _SUM:
            values = values if mask is None else values[mask]
            return float(values.sum(dtype=torch.float64 if isinstance(values, Tensor) else float))
        counted = _COUNTED[self.counts](values, self.ignored)
        if mask is not None:
            counted = counted & mask
        if self.weight is None:
            return _number_of(counted)
        labels = torch.as_tensor(values[counted], device=self.weight.device)
        if labels.numel() and int(labels.max()) >= len(self.weight):
            return math.nan  # they are no weights of these classes
        return float(self.weight[labels].sum(dtype=torch.float64))

    def described(self) -> str:
        """Return what a message calls the items."""
        text = self.counts
        if self.counts == NOTHING:
            return "nothing, as it is a sum"
        if self.counts == LABELS:
            text = f"labels that are not {self.ignored:g}"
        elif self.counts == _OTHER:
            text = f"{self.counts} {self.ignored:g}"
        if self.name:
            text += f" of {'.'.join(map(str, self.name))!r}"
        if self.mask:
            text += f" and where {'.'.join(map(str, self.mask))!r} is set"
        return f"the {text}" + (", without the first of each sequence" if self.shifts else "")


def items_of_each(divisors: Iterable[Divisor], batch: Any) -> Iterator[float]:
    """Count the items of a batch in several ways; integers are read once for all of them."""
    histograms: dict[tuple[Name, bool], NDArray[np.int64]] = {}
    for divisor in divisors:
        integers = _integers_of(divisor, batch)
        if integers is None:
            yield divisor.items(batch)
            continue
        key = (divisor.name, divisor.shifts)
        if key not in histograms:
            histograms[key] = _histogram(integers[..., 1:] if divisor.shifts else integers)
        counted = _COUNTED[divisor.counts](_NUMBERS, divisor.ignored)
        yield float(histograms[key][counted].sum())


def _integers_of(divisor: Divisor, batch: Any) -> Tensor | None:
    """Return the tensor that is counted, if it holds integers on the host and these alone tell."""
    is_of_values = divisor.counts in _COUNTED and not divisor.mask and divisor.weight is None
    if not is_of_values or not _NUMBERS[0] < divisor.ignored < _NUMBERS[-1]:
        return None
    tensor = tensor_of(batch, divisor.name)
    if tensor is None or tensor.device.type != "cpu" or tensor.is_floating_point():
        return None
    return tensor


def _histogram(integers: Tensor) -> NDArray[np.int64]:
    """Return how many integers are each of ``_NUMBERS``, or beyond the first or the last one."""
    lowest, highest = int(_NUMBERS[0]), int(_NUMBERS[-1])
    numbers = integers.detach().numpy().ravel().astype(np.int64, copy=False)
    return np.bincount(numbers.clip(lowest, highest) - lowest, minlength=len(_NUMBERS))


def _array(tensor: Tensor) -> Any:
    """Return values of the host as an array, which takes less time to count."""
    if tensor.device.type != "cpu":
        return tensor
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _number_of(counted: Any) -> int:
    if isinstance(counted, Tensor):
        return int(torch.count_nonzero(counted))
    return int(np.count_nonzero(counted))


def positions_inside(batch: Any) -> tuple[int, int] | None:
    """Return how many start and end positions of answers are in the inputs; None without any."""
    named = named_parts(batch) or {}
    starts, ends = named.get("start_positions"), named.get("end_positions")
    inputs = named.get("input_ids", named.get("inputs_embeds"))
    if not (isinstance(starts, Tensor) and isinstance(ends, Tensor)):
        return None
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        return None
    length = inputs.shape[1]
    return int((starts < length).sum()), int((ends < length).sum())


def tensor_of(batch: Any, name: Name) -> Tensor | None:
    """Return a tensor of a batch; None if this batch lacks the name."""
    if not name:
        return targets_of(batch)
    value = batch
    for key in name:
        parts: Any = named_parts(value)
        try:
            value = value[key] if parts is None else parts[key]
        except (LookupError, TypeError):
            return None
    return value if isinstance(value, Tensor) and _can_be_counted(value) else None


def tensors_of(batch: Any, name: Name = ()) -> Iterator[tuple[Name, Tensor]]:
    """Yield the tensors [samples, ...] of a batch, the targets first, by their names."""
    targets = targets_of(batch)
    if not name and targets is not None and _can_be_counted(targets):
        yield (), targets
    parts = named_parts(batch)
    named: Mapping[Any, Any] = {} if parts is None else parts
    if isinstance(batch, tuple | list):
        named = dict(enumerate(batch))
    for key, value in named.items():
        if not isinstance(value, Tensor):
            yield from tensors_of(value, (*name, key))
        elif value is not targets and _can_be_counted(value):
            yield (*name, key), value


def _can_be_counted(values: Tensor) -> bool:
    is_plain = values.layout is torch.strided and not values.is_nested
    return values.ndim > 0 and is_plain and not values.is_complex()


def divisors_of(batch: Any) -> Iterator[Divisor]:
    """Yield the ways to count the items of a batch, the likeliest first."""
    targets = targets_of(batch)
    if targets is not None and not targets.is_floating_point():
        yield Divisor(LABELS)
    if positions_inside(batch) is not None:
        yield Divisor(_POSITIONS)
    yield Divisor(SAMPLES)
    tensors = list(tensors_of(batch))
    for name, values in tensors:
        if name and values.is_floating_point() and values.numel() > LARGEST_INPUT:
            continue
        is_sequence = values.ndim == 2 or (values.ndim > 2 and not values.is_floating_point())
        for shifts in (False, True) if is_sequence else (False,):
            for divisor in _counts_of(values, is_target=not name):
                yield divisor._replace(name=name, shifts=shifts)
            masks = [
                mask_name
                for mask_name, mask in tensors
                if mask_name and mask.shape == values.shape and _is_mask(mask)
            ]
            for divisor in _counts_in_masks(name, values, masks):
                yield divisor._replace(shifts=shifts)


def _counts_in_masks(name: Name, values: Tensor, masks: list[Name]) -> Iterator[Divisor]:
    """Yield ways to count those values that a mask selects."""
    for mask in masks:
        if values.is_floating_point() and not _is_mask(values):
            yield Divisor(_SUM, name, mask=mask)
        if not name:
            yield Divisor(LABELS, mask=mask)
            yield Divisor(_OTHER, ignored=-1, mask=mask)


def _counts_of(values: Tensor, is_target: bool) -> Iterator[Divisor]:
    yield Divisor(_SUM)  # of a mask, of weights, or of lengths
    if _is_mask(values):
        yield Divisor("values of 0")
        if not is_target:
            return
    is_number = values.is_floating_point()
    yield Divisor("values that are not NaN" if is_number else LABELS)
    yield Divisor(_ALL)
    if is_target:
        yield Divisor("values of 0 or more")
        yield Divisor("values above 0")
    for ignored in _IGNORED_NUMBERS if is_number else _IGNORED_CLASSES:
        if is_target or ignored >= 0:
            yield Divisor(_OTHER, ignored=ignored)


def _is_mask(values: Tensor) -> bool:
    return values.dtype == torch.bool or bool(((values == 0) | (values == 1)).all())


class Compared(NamedTuple):
    """How a loss of torch counts the labels of a batch.

    ``is_certain`` is false if they may be a selection, which leaves nothing out in this batch.
    """

    divisor: Divisor
    is_certain: bool


def compared_by(call: TorchLoss, batch: Any) -> Compared | None:
    """Return how a loss of torch counts a batch; None if it does not compare all labels of it."""
    for name, labels in tensors_of(batch):
        shifts: bool | None = None
        if _equal(call.targets, labels):
            shifts = False
        elif labels.ndim > 1 and not labels.is_floating_point() and call.classes:
            later = labels[..., 1:]
            padded = functional.pad(later, (0, 1), value=call.ignored)
            if _equal(call.targets, later) or _equal(call.targets, padded):
                shifts = True
        if shifts is None:
            continue
        # What selects labels makes a copy, and does not select those that are ignored.
        storages = [tensor.untyped_storage().data_ptr() for tensor in (call.targets, labels)]
        is_certain = call.weight is None and storages[0] == storages[1]
        if not call.classes:
            return Compared(Divisor(_ALL, name), is_certain)
        if call.weight is None and bool((call.targets == call.ignored).any()):
            is_certain = True
        divisor = Divisor(LABELS, name, call.ignored, shifts, weight=call.weight)
        return Compared(divisor, is_certain)
    return None


def _equal(targets: Tensor, labels: Tensor) -> bool:
    if targets.numel() != labels.numel():
        return False
    return bool((targets.reshape(-1).double() == labels.reshape(-1).double()).all())
