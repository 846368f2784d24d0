"""Ways to count the items of a batch, and those that agree with what losses have divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runner.booster.batch import batch_size, named_parts, targets_of
from runner.booster.loss_graph import GraphError, Term, TorchLoss, terms_of
from runner.data.dataset import IGNORED

Name = tuple[str | int, ...]
"""Where a batch holds a tensor: keys of dictionaries and positions in tuples."""

SAMPLES, NOTHING, LABELS = "samples", "nothing", "labels that are not ignored"
_POSITIONS = "positions in the inputs"
_OTHER = "values that are not"
_COUNTED: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    # A negative label is no class: whoever does not ignore it by its number selects the others.
    LABELS: lambda values, ignored: (values != ignored) & (values >= 0),
    _OTHER: lambda values, ignored: values != ignored,
    "values that are not NaN": lambda values, _: ~torch.isnan(values),
    "values of 0 or more": lambda values, _: values >= 0,
    "values above 0": lambda values, _: values > 0,
    "values of 0": lambda values, _: values == 0,
    "values": lambda values, _: torch.ones_like(values, dtype=torch.bool),
}
_SUM = "sum of"
_IGNORED_CLASSES = (-100, -1, 0, 1, 2, 3, 255)
_IGNORED_NUMBERS = (-9999, -999, -100, -1, 0)
_LARGEST_INPUT = 1 << 20  # elements of an input that is no target, to save time
_KEPT = 8  # observations of a way to count
_CHECKED = 64  # passes on an accelerator, after which one of so many is checked
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-3}


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
        """Count the items of a batch; those of a batch without the tensor are its samples."""
        if self.counts == NOTHING:
            return 1.0
        inside = positions_inside(batch) if self.counts == _POSITIONS else None
        if inside is not None:
            return inside[0]
        values = _tensor(batch, self.name)
        if self.counts == SAMPLES or values is None:
            return batch_size(batch)
        if self.shifts:
            values = values[..., 1:]
        if self.counts == _SUM:
            return float(values.sum(dtype=torch.float64))
        counted = _COUNTED[self.counts](values, self.ignored)
        mask = _tensor(batch, self.mask) if self.mask else None
        if mask is not None:
            counted = counted & (mask[..., 1:] if self.shifts else mask).bool()
        if self.weight is None:
            return int(torch.count_nonzero(counted))
        return float(self.weight.to(values.device)[values[counted]].sum(dtype=torch.float64))

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


def _tensor(batch: Any, name: Name) -> Tensor | None:
    if not name:
        return targets_of(batch)
    value = batch
    for key in name:
        parts: Any = named_parts(value)
        value = value[key] if parts is None else parts.get(key)
    return value if isinstance(value, Tensor) else None


def _tensors(batch: Any, name: Name = ()) -> Iterator[tuple[Name, Tensor]]:
    """Yield the tensors [samples, ...] of a batch, the targets first, by their names."""
    targets = targets_of(batch)
    if not name and targets is not None:
        yield (), targets
    parts = named_parts(batch)
    named: Mapping[Any, Any] = {} if parts is None else parts
    if isinstance(batch, tuple | list):
        named = dict(enumerate(batch))
    for key, value in named.items():
        if isinstance(value, Tensor):
            if value.ndim and value is not targets:
                yield (*name, key), value
        else:
            yield from _tensors(value, (*name, key))


# -- candidates


def divisors_of(batch: Any) -> Iterator[Divisor]:
    """Yield the ways to count the items of a batch, the likeliest first."""
    targets = targets_of(batch)
    if targets is not None and not targets.is_floating_point():
        yield Divisor(LABELS)
    if positions_inside(batch) is not None:
        yield Divisor(_POSITIONS)
    yield Divisor(SAMPLES)
    tensors = list(_tensors(batch))
    for name, values in tensors:
        if name and values.is_floating_point() and values.numel() > _LARGEST_INPUT:
            continue
        for shifts in (False, True) if values.ndim > 1 else (False,):
            for divisor in _counts_of(values):
                yield divisor._replace(name=name, shifts=shifts)
            for mask_name, mask in tensors:
                if not name and mask_name and mask.shape == values.shape and _is_mask(mask):
                    yield Divisor(LABELS, shifts=shifts, mask=mask_name)
                    yield Divisor(_OTHER, (), -1, shifts, mask_name)


def _counts_of(values: Tensor) -> Iterator[Divisor]:
    if values.dtype != torch.bool:
        if values.is_floating_point():
            yield Divisor("values that are not NaN")
        else:
            yield Divisor(LABELS)
        yield Divisor("values of 0 or more")
        yield Divisor("values above 0")
        for ignored in _IGNORED_NUMBERS if values.is_floating_point() else _IGNORED_CLASSES:
            yield Divisor(_OTHER, ignored=ignored)
    yield Divisor(_SUM)
    yield Divisor("values of 0")
    yield Divisor("values")


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
    for name, labels in _tensors(batch):
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
            return Compared(Divisor("values", name), is_certain)
        if call.weight is None and bool((call.targets == call.ignored).any()):
            is_certain = True
        divisor = Divisor(LABELS, name, call.ignored, shifts, weight=call.weight)
        return Compared(divisor, is_certain)
    return None


def _equal(targets: Tensor, labels: Tensor) -> bool:
    if targets.numel() != labels.numel():
        return False
    return bool((targets.reshape(-1).double() == labels.reshape(-1).double()).all())


# -- observations


class Observed(NamedTuple):
    """What the parts of a loss divided by, and the items of that batch by one way to count."""

    items: float
    divisors: tuple[float, ...]
    is_zero: bool  # the loss is 0, or NaN as a mean over nothing is


def tolerance_of(loss: Tensor) -> float:
    """Return by how much a divisor may differ from a count, as it is rounded."""
    return _TOLERANCES.get(loss.dtype, 4e-3)


@dataclass
class Candidate:
    """A way to count, with what was observed."""

    divisor: Divisor
    observed: list[Observed] = field(default_factory=list)

    def fits(self, tolerance: float) -> bool:
        """Return whether each part divides by the items times a constant, or by a constant."""
        parts = len(self.observed[0].divisors)
        fitting = [self._fits(part, tolerance) for part in range(parts)]
        constant = [self._is_constant(part, tolerance) for part in range(parts)]
        if not all(a or b for a, b in zip(fitting, constant, strict=True)):
            return False
        counts = {observed.items for observed in self.observed}
        if counts == {0}:
            return all(observed.is_zero for observed in self.observed)
        return any(fitting) or len(counts) == 1

    def _fits(self, part: int, tolerance: float) -> bool:
        ratio: float | None = None
        for observed in self.observed:
            items, divisor = observed.items, observed.divisors[part]
            if not items and observed.is_zero and divisor <= 1:
                continue  # nothing is divided by 0, 1, or a small number
            if not items or not divisor:
                return False
            ratio = divisor / items if ratio is None else ratio
            if not abs(divisor - ratio * items) <= tolerance * abs(divisor):
                return False
        return True

    def _is_constant(self, part: int, tolerance: float) -> bool:
        first = self.observed[0].divisors[part]
        numbers = [observed.divisors[part] for observed in self.observed]
        return all(abs(number - first) <= tolerance * abs(first) for number in numbers)

    def shortened(self) -> Candidate:
        """Return the candidate with a few of the observations, which show all that is known."""
        first = [seen for seen in self.observed if seen.items][:_KEPT]
        return Candidate(self.divisor, first or self.observed[:1])

    def scale(self, tolerance: float) -> float:
        """Return what the loss divides by for each item."""
        for part in range(len(self.observed[0].divisors)):
            if self._fits(part, tolerance):
                for observed in self.observed:
                    if observed.items:
                        return observed.divisors[part] / observed.items
        return 1.0


@dataclass
class Candidates:
    """The ways to count that agree with what losses of earlier batches divided by.

    Attributes:
        known: whether the one way that is left was read off a loss of torch.
        outer: whether a loss has more parts for more samples, so that only what divides their sum
            counts.
        factors: whether numbers that the parts are multiplied with depend on the batch.
        looks: how many batches were looked at to tell candidates apart.
        passes: how many losses were compared with the items.
    """

    candidates: list[Candidate]
    known: bool = False
    outer: bool = False
    factors: bool = False
    tolerance: float = 1e-9
    looks: int = 0
    passes: int = 0

    @property
    def divisor(self) -> Divisor:
        return self.candidates[0].divisor

    def items(self, batch: Any) -> float:
        """Return what the loss of a batch divides by, up to a constant factor."""
        return self._items(self.candidates[0], batch)

    def _items(self, candidate: Candidate, batch: Any) -> float:
        scale = 1.0 if self.known else candidate.scale(self.tolerance)
        return scale * candidate.divisor.items(batch)

    @property
    def is_settled(self) -> bool:
        """Whether there is one way to count."""
        return self.known or len(self.candidates) == 1

    def disagree(self, batch: Any) -> bool:
        """Return whether the candidates count a batch differently."""
        if self.is_settled:
            return False
        first = self.items(batch)
        margin = self.tolerance * abs(first)
        others = self.candidates[1:]
        return any(abs(self._items(other, batch) - first) > margin for other in others)

    def read(self, terms: Sequence[Term]) -> tuple[float, ...]:
        """Return what the parts of a loss divide by."""
        if self.outer:
            return (terms[0].outer,)
        return tuple(term.divisor / (term.factor if self.factors else 1.0) for term in terms)

    def after(self, batch: Any, loss: Tensor, terms: Sequence[Term]) -> Candidates:
        """Return the candidates that agree with one more batch too."""
        divisors = self.read(terms)
        value = float(loss)
        is_zero = value == 0 or math.isnan(value)
        remaining = []
        for candidate in self.candidates:
            seen = Observed(candidate.divisor.items(batch), divisors, is_zero)
            extended = Candidate(candidate.divisor, [*candidate.observed, seen])
            same_parts = len(divisors) == len(extended.observed[0].divisors)
            if same_parts and extended.fits(self.tolerance):
                remaining.append(extended)
        return replace(self, candidates=remaining)

    def common(self, other: Candidates) -> Candidates:
        """Return the candidates that agree with what another rank has seen too."""
        if self.known or other.known:
            return self if self.known else other
        theirs = {each.divisor._replace(weight=None): each for each in other.candidates}
        remaining = []
        for candidate in self.candidates:
            counterpart = theirs.get(candidate.divisor._replace(weight=None))
            if counterpart is None:
                continue
            observed = dict.fromkeys([*candidate.observed, *counterpart.observed])
            together = Candidate(candidate.divisor, list(observed))
            parts = {len(seen.divisors) for seen in observed}
            if len(parts) == 1 and together.fits(self.tolerance):
                remaining.append(together.shortened())
        return replace(self, candidates=remaining)

    def agree_with(self, loss: Tensor, items: float) -> bool:
        """Return whether a loss may divide by so many items; True if its graph does not tell."""
        self.passes += 1
        if self.known or loss.grad_fn is None:
            return True
        # To read a number waits for an accelerator.
        if loss.device.type != "cpu" and self.passes > _CHECKED and self.passes % _CHECKED:
            return True
        try:
            terms = terms_of(loss)
        except GraphError:
            return True
        divisors = self.read(terms)
        value = float(loss.detach())
        is_zero = value == 0 or math.isnan(value)
        if self.outer and len(terms) == 1:
            return True
        first = self.candidates[0]
        scale = first.scale(self.tolerance)
        if len(divisors) != len(first.observed[0].divisors):
            # The loss has other parts than in evaluation.
            near = [abs(divisor - items) <= self.tolerance * items for divisor in divisors]
            return not items or any(near)
        seen = Observed(items / scale, divisors, is_zero)
        return Candidate(first.divisor, [*first.observed, seen]).fits(self.tolerance)

    def described(self, loss: Tensor) -> str:
        """Return what a loss divides by, for a message."""
        divisors = self.read(terms_of(loss))
        return " and ".join(f"{divisor:g}" for divisor in dict.fromkeys(divisors))

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the number of passes, as lists and dictionaries."""
        candidates = []
        for candidate in self.candidates:
            divisor = candidate.divisor._asdict()
            named = {name: value for name, value in divisor.items() if value is not None}
            observed = [list(observed) for observed in candidate.observed]
            candidates.append({"divisor": named, "observed": observed})
        names = ("known", "outer", "factors", "tolerance", "looks")
        return {"candidates": candidates, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Candidates:
        """Return what :meth:`state_dict` described."""
        candidates = []
        for saved in state["candidates"]:
            named = dict(saved["divisor"])
            named |= {"name": tuple(named["name"]), "mask": tuple(named["mask"])}
            observed = []
            for items, divisors, is_zero in saved["observed"]:
                observed.append(Observed(items, tuple(divisors), is_zero))
            candidates.append(Candidate(Divisor(**named), observed))
        return cls(**{**state, "candidates": candidates})
