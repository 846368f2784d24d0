"""Mistakes in how the norms of ranks, or of classes of parameters, are put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from runner.check.reference import combined
from runner.check.sums import Class, Mistake, Sums
from runner.config.notation import first_few, ranks_as_text

_SUBSETS = 8  # ranks up to which all sets of ranks are tried
_PRODUCT = 4000  # pairs of mistakes in two classes of parameters that are tried


class WrongSum(NamedTuple):
    """A wrong sum of powers of one class of parameters, on each rank."""

    sentence: str
    powers: list[float]


def of_this_rank(sums: Sums) -> Iterator[Mistake]:
    """Yield the mistake that every rank takes the norm of what it holds."""
    if sums.whole.size > 1:
        yield Mistake("the share of this rank alone", sums.norms_of_ranks())


def of_ranks(sums: Sums) -> Iterator[Mistake]:
    """Yield mistakes in how the norms of ranks are put together."""
    size = sums.whole.size
    if size == 1:
        return
    norms = sums.norms_of_ranks()
    total = math.fsum(norms)
    for what, norm in (
        ("the largest norm of a rank", max(norms)),
        ("the mean of the norms of ranks", total / size),
        ("the sum of the norms of ranks", total),
    ):
        yield Mistake.on_all(sums, f"{what} instead of the norm of all", norm)
    for rank, norm in enumerate(norms):
        yield Mistake.on_all(sums, f"the share of rank {rank} alone", norm)
    if math.isinf(sums.p):
        return
    shares = [sums.on_rank(sums.all, rank) for rank in range(size)]
    sentence = "the mean over ranks of the sums of powers, instead of their sum"
    yield Mistake.on_all(sums, sentence, sums.root(math.fsum(shares) / size))
    if sums.p != 2:
        sentence = f"the norms of ranks were put together with p=2 instead of p={sums.p:g}"
        yield Mistake.on_all(sums, sentence, math.sqrt(math.fsum(norm**2 for norm in norms)))


def of_tied(sums: Sums) -> Iterator[Mistake]:
    """Yield the mistake that parameters on two ranks that are one count twice."""
    tied = [number for number in sums.all if sums.units[number].tied]
    if not tied or math.isinf(sums.p):
        return
    names = first_few([f"{first} = {second}" for first, second in sums.whole.tied])
    total = combined([sums.of(sums.all), sums.of(tied)], sums.p)
    yield Mistake.on_all(sums, f"tied parameters counted 2 times: {names}", sums.root(total))


def of_one_class(sums: Sums, classes: Sequence[Class]) -> Iterator[Mistake]:
    """Yield mistakes in one class of parameters, beside others that are right."""
    right = _right_sums(sums, classes)
    for number, group in enumerate(classes):
        beside = [*right[:number], *right[number + 1 :]]
        for wrong in wrong_sums(sums, group):
            yield Mistake(wrong.sentence, _total(sums, [wrong.powers, *beside]))


def of_two_classes(sums: Sums, classes: Sequence[Class]) -> Iterator[Mistake]:
    """Yield mistakes in two classes of parameters at once."""
    right = _right_sums(sums, classes)
    wrong = [list(wrong_sums(sums, group)) for group in classes]
    for i, k in combinations(range(len(classes)), 2):
        beside = [powers for number, powers in enumerate(right) if number not in (i, k)]
        for count, (first, second) in enumerate(product(wrong[i], wrong[k])):
            if count == _PRODUCT:
                break
            sentence = f"{first.sentence}; {second.sentence}"
            yield Mistake(sentence, _total(sums, [first.powers, second.powers, *beside]))


def _right_sums(sums: Sums, classes: Sequence[Class]) -> list[list[float]]:
    """Return the right sum of powers of each class, for every rank."""
    return [[sums.of(group.numbers)] * sums.whole.size for group in classes]


def _total(sums: Sums, contributions: Sequence[Sequence[float]]) -> list[float]:
    """Return the norm on each rank that contributions of classes add up to."""
    norms: list[float] = []
    for rank in range(sums.whole.size):
        norms.append(sums.root(combined([powers[rank] for powers in contributions], sums.p)))
    return norms


def wrong_sums(sums: Sums, group: Class) -> Iterator[WrongSum]:
    """Yield wrong ways to add up a class of parameters over ranks."""
    size = sums.whole.size
    replicated = group.kind == "replicated"
    shares = [sums.on_rank(group.numbers, rank) for rank in range(size)]
    once = sums.of(group.numbers)
    everywhere = combined(shares, sums.p)
    if group.kind in ("replicated", "alone", "undeclared") and everywhere != once:
        sentence = f"replicated parameters counted {size} times: {group.label}"
        yield WrongSum(sentence, [everywhere] * size)
    if not replicated:
        what = "shards" if group.kind == "sharded" else "parameters"
        yield WrongSum(f"the share of this rank alone of the {what} {group.label}", shares)
    yield WrongSum(f"left out of the norm: {group.label}", [0.0] * size)
    if math.isinf(sums.p):
        return
    if not replicated:
        yield from _over_wrong_ranks(sums, group, shares)
    kind = "replicated parameters " if replicated else ""
    for count in range(2, size + 1):
        yield WrongSum(f"{kind}counted {count} times: {group.label}", [once * count] * size)


def _over_wrong_ranks(sums: Sums, group: Class, shares: Sequence[float]) -> Iterator[WrongSum]:
    """Yield sums of parameters that differ between ranks, over too many or too few of these."""
    size = sums.whole.size
    once = sums.of(group.numbers)
    everywhere = combined(shares, sums.p)
    if everywhere != once:
        copies = {len(sums.units[number].holders) for number in group.numbers}
        times = f"{copies.pop()} times" if len(copies) == 1 else "once a rank"
        sentence = f"counted {times}, over the wrong group: {group.label}"
        yield WrongSum(sentence, [everywhere] * size)
    for parts in range(2, size + 1):
        sentence = f"averaged over {parts} ranks instead of added: {group.label}"
        yield WrongSum(sentence, [once / parts] * size)
        sentence += " (their norms, not the powers)"
        yield WrongSum(sentence, [once / parts**sums.p] * size)
    if 2 < size <= _SUBSETS:
        yield from _over_groups_of_equal_size(shares, group.label)


def _over_groups_of_equal_size(shares: Sequence[float], label: str) -> Iterator[WrongSum]:
    """Yield sums over groups of equal size that divide the ranks: neighbours, or every n-th."""
    size = len(shares)
    for width in range(2, size):
        if size % width:
            continue
        count = size // width
        blocks = [[*range(start, start + width)] for start in range(0, size, width)]
        strides = [[*range(start, size, count)] for start in range(count)]
        for groups in (blocks, strides):
            powers = [0.0] * size
            for ranks in groups:
                total = math.fsum(shares[rank] for rank in ranks)
                for rank in ranks:
                    powers[rank] = total
            text = " and of ".join(ranks_as_text(ranks) for ranks in groups)
            yield WrongSum(f"summed over the wrong group, that of {text}: {label}", powers)
