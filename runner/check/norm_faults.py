"""Which mistake gives a wrong norm: each one predicts a number, and the right one fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product

import torch

from runner.check.parts import Unit, Whole
from runner.check.reference import combined, root
from runner.config.notation import first_few, ranks_as_text

_SUBSETS = 8  # ranks up to which all sets of ranks are tried
_PRODUCT = 4000  # mistakes in several classes of parameters that are tried together


@dataclass
class Sums:
    """Sums of powers of each unit of a model, for one p."""

    whole: Whole
    p: float
    powers: dict[int, float]  # by the position of the unit in ``whole.units``
    units: Sequence[Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.units = self.whole.units

    def of(self, numbers: Sequence[int]) -> float:
        """Return the sum over some units, each once."""
        return combined([self.powers[number] for number in numbers], self.p)

    def on_rank(self, numbers: Sequence[int], rank: int) -> float:
        """Return the sum over what one rank holds of some units."""
        held = [number for number in numbers if rank in self.units[number].holders]
        return self.of(held)

    def root(self, total: float) -> float:
        return root(total, self.p)

    @property
    def all(self) -> list[int]:
        return list(range(len(self.units)))

    @property
    def norm(self) -> float:
        return self.root(self.of(self.all))


@dataclass
class Mistake:
    """What goes wrong, in a sentence, and the norm that each rank then gets."""

    sentence: str
    predicted: list[float]


@dataclass
class Class:
    """Units that code for clipping treats in one way."""

    label: str
    kind: str  # groups, sharded, replicated, alone
    numbers: list[int]


def matching(
    mistakes: Iterator[Mistake], values: Sequence[float | None], true: float, tolerance: float
) -> str | None:
    """Return the sentence of the first mistake that predicts the value of every rank."""
    for mistake in mistakes:
        differs = any(not _close(value, true, 2 * tolerance) for value in mistake.predicted)
        if differs and fits(mistake.predicted, values, tolerance):
            return mistake.sentence
    return None


def fits(predicted: Sequence[float], values: Sequence[float | None], tolerance: float) -> bool:
    pairs = zip(predicted, values, strict=True)
    return all(value is None or _close(guess, value, tolerance) for guess, value in pairs)


def _close(first: float, second: float, tolerance: float) -> bool:
    if first == second:
        return True
    if not (math.isfinite(first) and math.isfinite(second)):
        return False
    return abs(first - second) <= tolerance * max(abs(first), abs(second))


def classes_of(whole: Whole) -> list[Class]:
    """Return the classes of a model's units: groups, shards, replicas, parameters of one rank."""
    found: dict[tuple[str, str], Class] = {}
    for number, unit in enumerate(whole.units):
        pattern = unit.facts.pattern
        if pattern is not None:
            key = ("groups", pattern)
        elif unit.facts.sharded:
            key = ("sharded", "")
        elif unit.facts.name in whole.undeclared:
            key = ("undeclared", "")
        elif len(unit.holders) > 1:
            key = ("replicated", "")
        else:
            key = ("alone", "")
        found.setdefault(key, Class("", key[0], [])).numbers.append(number)
    for group in found.values():
        names = list(dict.fromkeys(whole.units[number].name for number in group.numbers))
        group.label = first_few(names)
    return list(found.values())


def mistakes(
    sums: Sums,
    others: Sequence[Sums],
    instead: dict[str, list[float]],
    extra: dict[str, list[float]],
    factors: bool,
) -> Iterator[Mistake]:
    """Yield mistakes, the commonest first.

    ``others`` are sums for other p, ``instead`` norms of something else on each rank, and ``extra``
    sums of powers on each rank of what does not belong to the norm.
    """
    size = sums.whole.size
    classes = classes_of(sums.whole)
    if math.isinf(sums.p):
        yield Mistake("the norm of p=inf is always 1", [1.0] * size)
    yield from _of_this_rank(sums)
    yield from _tied(sums)
    if len(classes) == 1:
        yield from _of_ranks(sums)
    yield from _of_one_class(sums, classes)
    if len(classes) > 1:
        yield from _of_ranks(sums)
    yield from _of_p(sums, others)
    for label, norms in instead.items():
        yield Mistake(label, norms)
    total = sums.of(sums.all)
    for label, powers in extra.items():
        norms = [sums.root(combined([total, power], sums.p)) for power in powers]
        yield Mistake(label, norms)
    yield from _left_out(sums)
    yield from _of_types(sums)
    yield from _of_two_classes(sums, classes)
    if factors:
        yield from _factors(sums)


def _same(value: float, size: int) -> list[float]:
    return [value] * size


def _norms_of_ranks(sums: Sums) -> list[float]:
    return [sums.root(sums.on_rank(sums.all, rank)) for rank in range(sums.whole.size)]


def _of_this_rank(sums: Sums) -> Iterator[Mistake]:
    if sums.whole.size > 1:
        yield Mistake("the share of this rank alone", _norms_of_ranks(sums))


def _of_ranks(sums: Sums) -> Iterator[Mistake]:
    """Yield mistakes in how the norms of ranks are put together."""
    size = sums.whole.size
    if size == 1:
        return
    norms = _norms_of_ranks(sums)
    yield Mistake("the largest norm of a rank instead of the norm of all", _same(max(norms), size))
    mean = math.fsum(norms) / size
    yield Mistake("the mean of the norms of ranks instead of the norm of all", _same(mean, size))
    total = math.fsum(norms)
    yield Mistake("the sum of the norms of ranks instead of the norm of all", _same(total, size))
    for rank, norm in enumerate(norms):
        yield Mistake(f"the share of rank {rank} alone", _same(norm, size))
    if math.isinf(sums.p):
        return
    shares = [sums.on_rank(sums.all, rank) for rank in range(size)]
    yield Mistake(
        "the mean over ranks of the sums of powers, instead of their sum",
        _same(sums.root(math.fsum(shares) / size), size),
    )
    if sums.p != 2:
        squares = math.sqrt(math.fsum(norm**2 for norm in norms))
        text = f"the norms of ranks were put together with p=2 instead of p={sums.p:g}"
        yield Mistake(text, _same(squares, size))


def _tied(sums: Sums) -> Iterator[Mistake]:
    tied = [number for number in sums.all if sums.units[number].tied]
    if not tied or math.isinf(sums.p):
        return
    names = first_few([f"{first} = {second}" for first, second in sums.whole.tied])
    total = combined([sums.of(sums.all), sums.of(tied)], sums.p)
    text = f"tied parameters counted 2 times: {names}"
    yield Mistake(text, _same(sums.root(total), sums.whole.size))


def _of_one_class(sums: Sums, classes: Sequence[Class]) -> Iterator[Mistake]:
    """Yield mistakes in one class of parameters, beside others that are right."""
    right = [_same(sums.of(group.numbers), sums.whole.size) for group in classes]
    for number, group in enumerate(classes):
        others = [*right[:number], *right[number + 1 :]]
        for sentence, values in _wrong_sums(sums, group):
            yield Mistake(sentence, _total(sums, [values, *others]))


def _of_two_classes(sums: Sums, classes: Sequence[Class]) -> Iterator[Mistake]:
    """Yield mistakes in two classes of parameters at once."""
    right = [_same(sums.of(group.numbers), sums.whole.size) for group in classes]
    wrong = [list(_wrong_sums(sums, group)) for group in classes]
    for first, second in combinations(range(len(classes)), 2):
        others = [values for number, values in enumerate(right) if number not in (first, second)]
        pairs = islice(product(wrong[first], wrong[second]), _PRODUCT)
        for (one, values), (other, more) in pairs:
            yield Mistake(f"{one}; {other}", _total(sums, [values, more, *others]))


def _total(sums: Sums, contributions: Sequence[Sequence[float]]) -> list[float]:
    """Return the norm on each rank that contributions of classes add up to."""
    norms: list[float] = []
    for rank in range(sums.whole.size):
        norms.append(sums.root(combined([values[rank] for values in contributions], sums.p)))
    return norms


def _wrong_sums(sums: Sums, group: Class) -> Iterator[tuple[str, list[float]]]:
    """Yield wrong ways to add up a class of parameters over ranks."""
    size = sums.whole.size
    shares = [sums.on_rank(group.numbers, rank) for rank in range(size)]
    once = sums.of(group.numbers)
    everywhere = combined(shares, sums.p)
    label = group.label
    if group.kind in ("replicated", "alone", "undeclared") and everywhere != once:
        yield f"replicated parameters counted {size} times: {label}", _same(everywhere, size)
    if group.kind != "replicated":
        what = "shards" if group.kind == "sharded" else "parameters"
        yield f"the share of this rank alone of the {what} {label}", shares
    yield f"left out of the norm: {label}", _same(0.0, size)
    if math.isinf(sums.p):
        return
    if group.kind != "replicated":
        copies = sorted({len(sums.units[number].holders) for number in group.numbers})
        if everywhere != once:
            times = f"{copies[-1]} times" if len(copies) == 1 else "once a rank"
            yield f"counted {times}, over the wrong group: {label}", _same(everywhere, size)
        for parts in range(2, size + 1):
            text = f"averaged over {parts} ranks instead of added: {label}"
            yield text, _same(once / parts, size)
            yield text + " (their norms, not the powers)", _same(once / parts**sums.p, size)
        if 2 < size <= _SUBSETS:
            yield from _of_subsets(shares, size, label)
    kind = "replicated parameters " if group.kind == "replicated" else ""
    for count in range(2, size + 1):
        yield f"{kind}counted {count} times: {label}", _same(once * count, size)


def _of_subsets(
    shares: Sequence[float], size: int, label: str
) -> Iterator[tuple[str, list[float]]]:
    """Yield sums over groups of equal size that divide the ranks: neighbours, or every n-th."""
    for width in range(2, size):
        if size % width:
            continue
        count = size // width
        blocks = [[*range(start, start + width)] for start in range(0, size, width)]
        strides = [[*range(start, size, count)] for start in range(count)]
        for groups in (blocks, strides):
            values = [0.0] * size
            for ranks in groups:
                total = math.fsum(shares[rank] for rank in ranks)
                for rank in ranks:
                    values[rank] = total
            text = " and of ".join(ranks_as_text(ranks) for ranks in groups)
            yield f"summed over the wrong group, that of {text}: {label}", values


def _of_p(sums: Sums, others: Sequence[Sums]) -> Iterator[Mistake]:
    size = sums.whole.size
    for other in others:
        text = f"this is the norm of p={other.p:g}, not of p={sums.p:g}"
        yield Mistake(text, _same(other.norm, size))
    if math.isinf(sums.p):
        shares = [sums.on_rank(sums.all, rank) for rank in range(size)]
        yield Mistake("maxima of ranks added instead of their maximum", _same(sum(shares), size))
        return
    total = sums.of(sums.all)
    yield Mistake(
        f"the root is missing: this is the norm to the power of {sums.p:g}", _same(total, size)
    )
    yield Mistake("the root was taken twice", _same(sums.root(sums.root(total)), size))
    norms = [sums.root(sums.powers[number]) for number in sums.all]
    yield Mistake(
        "the sum of the norms of parameters, not the norm of all", _same(math.fsum(norms), size)
    )
    yield Mistake(
        "the largest norm of a parameter, not the norm of all", _same(max(norms, default=0.0), size)
    )
    if norms:
        yield Mistake(
            "the mean of the norms of parameters, not the norm of all",
            _same(math.fsum(norms) / len(norms), size),
        )
    elements = 0
    for unit in sums.units:
        elements += unit.facts.elements
    if elements:
        yield Mistake(
            "the root mean square of the elements, not the norm",
            _same(sums.norm / elements ** (1 / sums.p), size),
        )


def _left_out(sums: Sums) -> Iterator[Mistake]:
    """Yield parameters, modules and pairs of parameters that may be left out or counted twice."""
    size = sums.whole.size
    sets: dict[str, list[int]] = {}
    for number in sums.all:
        name = sums.units[number].name
        sets.setdefault(name, []).append(number)
        prefix = name
        while "." in prefix:
            prefix = prefix.rpartition(".")[0]
            sets.setdefault(prefix, []).append(number)
        sets.setdefault("*." + name.rpartition(".")[2], []).append(number)
        kind = "vectors" if len(sums.units[number].facts.shape) < 2 else "matrices"
        sets.setdefault(f"all {kind}", []).append(number)
        sets.setdefault(f"all {sums.units[number].facts.dtype}", []).append(number)
    total = sums.of(sums.all)
    chosen = [numbers for numbers in sets.values() if len(numbers) < len(sums.units)]
    labels: list[str] = []
    for numbers in chosen:
        inside = set(numbers)
        others = [number for number in sums.all if number not in inside]
        label = first_few(list(dict.fromkeys(sums.units[number].name for number in numbers)))
        labels.append(label)
        norm = sums.root(sums.of(others))
        yield Mistake(f"left out of the norm: {label}", _same(norm, size))
    for numbers, label in zip(chosen, labels, strict=True):
        norm = sums.root(sums.of(numbers))
        yield Mistake(f"all but these left out of the norm: {label}", _same(norm, size))
        if not math.isinf(sums.p):
            twice = combined([total, sums.of(numbers)], sums.p)
            yield Mistake(f"counted 2 times: {label}", _same(sums.root(twice), size))


def _of_types(sums: Sums) -> Iterator[Mistake]:
    """Yield the norm in other floating-point types."""
    size = sums.whole.size
    norm = sums.norm
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        value = float(torch.tensor(norm, dtype=torch.float64).to(dtype))
        if math.isfinite(value):
            yield Mistake(f"the norm is rounded to {name}", _same(value, size))
    overflows = sums.p != 0 and not math.isinf(sums.p)
    total = sums.of(sums.all)
    if overflows and total > torch.finfo(torch.float16).max:
        large = "float32" if total > torch.finfo(torch.float32).max else "float16"
        yield Mistake(f"the sum of powers is too large for {large}", _same(math.inf, size))


def _factors(sums: Sums) -> Iterator[Mistake]:
    """Yield numbers of ranks or microbatches, and loss scales, that the norm may be off by."""
    size = sums.whole.size
    norm = sums.norm
    for times in (*range(2, 33), 64, 128):
        for factor, text in (
            (float(times), f"{times} times the norm"),
            (1.0 / times, f"1/{times} of the norm"),
        ):
            yield Mistake(
                f"{text}: gradients were added instead of averaged, or averaged twice, over ranks "
                "or microbatches, for the norm alone",
                _same(norm * factor, size),
            )
        for factor, text in (
            (math.sqrt(times), f"√{times} times the norm"),
            (math.sqrt(1 / times), f"1/√{times} of the norm"),
        ):
            yield Mistake(
                f"{text}: squares were added, or averaged, over {times} ranks that hold the same "
                "or different parameters",
                _same(norm * factor, size),
            )
    for power in range(8, 25):
        scale = 2.0**power
        text = f"2^{power} times the norm: the norm of gradients that were not unscaled"
        yield Mistake(text, _same(norm * scale, size))
        text = f"2^-{power} times the norm: gradients were unscaled inside of the block, or twice"
        yield Mistake(text, _same(norm / scale, size))


def in_bfloat16(values: Sequence[float | None]) -> bool:
    """Return whether bfloat16 has every one of these values."""
    return all(
        value is None or float(torch.tensor(value).bfloat16()) == float(torch.tensor(value))
        for value in values
    )


Finder = Callable[[Sequence[float | None], float, bool], str | None]
"""Returns the mistake that explains the norms of ranks, None if none does.

It is given the norms, a tolerance, and whether plain factors, such as 1/2, are explanations.
"""
