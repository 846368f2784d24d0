"""Mistakes in the sum itself: another p, parameters left out, another type, a plain factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from runner.check.reference import combined
from runner.check.sums import Mistake, Sums
from runner.config.notation import first_few


def of_p(sums: Sums, sums_of_other_p: Sequence[Sums]) -> Iterator[Mistake]:
    """Yield mistakes in p and in the root."""
    for another in sums_of_other_p:
        sentence = f"this is the norm of p={another.p:g}, not of p={sums.p:g}"
        yield Mistake.on_all(sums, sentence, another.norm)
    if math.isinf(sums.p):
        shares = [sums.on_rank(sums.all, rank) for rank in range(sums.whole.size)]
        sentence = "maxima of ranks added instead of their maximum"
        yield Mistake.on_all(sums, sentence, sum(shares))
        return
    total = sums.of(sums.all)
    sentence = f"the root is missing: this is the norm to the power of {sums.p:g}"
    yield Mistake.on_all(sums, sentence, total)
    yield Mistake.on_all(sums, "the root was taken twice", sums.root(sums.root(total)))
    yield from _of_parameters(sums)


def _of_parameters(sums: Sums) -> Iterator[Mistake]:
    """Yield mistakes in how the norms of parameters are put together."""
    norms = [sums.root(sums.powers[number]) for number in sums.all]
    total = math.fsum(norms)
    for what, norm in (
        ("the sum of the norms of parameters", total),
        ("the largest norm of a parameter", max(norms, default=0.0)),
        ("the mean of the norms of parameters", total / max(len(norms), 1)),
    ):
        yield Mistake.on_all(sums, f"{what}, not the norm of all", norm)
    elements = sum(unit.facts.elements for unit in sums.units)
    if elements:
        sentence = "the root mean square of the elements, not the norm"
        yield Mistake.on_all(sums, sentence, sums.norm / elements ** (1 / sums.p))


def of_left_out(sums: Sums) -> Iterator[Mistake]:
    """Yield parameters, modules and kinds that may be left out, or counted twice."""
    total = sums.of(sums.all)
    labels: list[str] = []
    subsets = [numbers for numbers in _subsets(sums) if len(numbers) < len(sums.units)]
    for numbers in subsets:
        inside = set(numbers)
        remaining = [number for number in sums.all if number not in inside]
        names = list(dict.fromkeys(sums.units[number].name for number in numbers))
        label = first_few(names)
        labels.append(label)
        norm = sums.root(sums.of(remaining))
        yield Mistake.on_all(sums, f"left out of the norm: {label}", norm)
    for numbers, label in zip(subsets, labels, strict=True):
        norm = sums.root(sums.of(numbers))
        yield Mistake.on_all(sums, f"all but these left out of the norm: {label}", norm)
        if not math.isinf(sums.p):
            twice = combined([total, sums.of(numbers)], sums.p)
            yield Mistake.on_all(sums, f"counted 2 times: {label}", sums.root(twice))


def _subsets(sums: Sums) -> list[list[int]]:
    """Return the units of each parameter, module, last name, dimension and type."""
    subsets: dict[str, list[int]] = {}
    for number, unit in enumerate(sums.units):
        name = unit.name
        labels = [name]
        prefix = name
        while "." in prefix:
            prefix = prefix.rpartition(".")[0]
            labels.append(prefix)
        labels.append("*." + name.rpartition(".")[2])
        labels.append("all vectors" if len(unit.facts.shape) < 2 else "all matrices")
        labels.append(f"all {unit.facts.dtype}")
        for label in labels:
            subsets.setdefault(label, []).append(number)
    return list(subsets.values())


def of_types(sums: Sums) -> Iterator[Mistake]:
    """Yield the norm in other floating-point types."""
    norm = sums.norm
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        rounded = float(torch.tensor(norm, dtype=torch.float64).to(dtype))
        if math.isfinite(rounded):
            yield Mistake.on_all(sums, f"the norm is rounded to {name}", rounded)
    overflows = sums.p != 0 and not math.isinf(sums.p)
    total = sums.of(sums.all)
    if overflows and total > torch.finfo(torch.float16).max:
        large = "float32" if total > torch.finfo(torch.float32).max else "float16"
        yield Mistake.on_all(sums, f"the sum of powers is too large for {large}", math.inf)


def of_factors(sums: Sums) -> Iterator[Mistake]:
    """Yield numbers of ranks or microbatches, and loss scales, that the norm may be off by."""
    norm = sums.norm
    averaged = (
        "gradients were added instead of averaged, or averaged twice, over ranks or microbatches, "
        "for the norm alone"
    )
    for times in (*range(2, 33), 64, 128):
        squares = (
            f"squares were added, or averaged, over {times} ranks that hold the same or different "
            "parameters"
        )
        for text, factor in (
            (f"{times} times the norm: {averaged}", float(times)),
            (f"1/{times} of the norm: {averaged}", 1.0 / times),
            (f"√{times} times the norm: {squares}", math.sqrt(times)),
            (f"1/√{times} of the norm: {squares}", math.sqrt(1 / times)),
        ):
            yield Mistake.on_all(sums, text, norm * factor)
    for power in range(8, 25):
        scale = 2.0**power
        text = f"2^{power} times the norm: the norm of gradients that were not unscaled"
        yield Mistake.on_all(sums, text, norm * scale)
        text = f"2^-{power} times the norm: gradients were unscaled inside of the block, or twice"
        yield Mistake.on_all(sums, text, norm / scale)
