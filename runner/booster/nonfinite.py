"""Gradients that are not finite: what is done with them, and the error that names them."""

from __future__ import annotations

import math
from typing import Literal

import torch.distributed as dist

from runner.clip import Layout
from runner.clip.norms import Powers
from runner.config.notation import first_few, ranks_as_text

Nonfinite = Literal["skip", "error", "ignore"]


class NonFiniteGradient(FloatingPointError):
    """A gradient holds NaN or inf, and ``nonfinite`` is ``error``; or too many steps were
    skipped.
    """

    def __init__(self, finding: str, advice: str = "", norm: float = math.nan) -> None:
        super().__init__(finding, advice, norm)
        self.finding = finding
        self.advice = advice
        self.norm = norm

    def __str__(self) -> str:
        return f"{self.finding} ({self.advice})" if self.advice else self.finding


def finding(layout: Layout, powers: Powers | None, norm: float) -> str:
    """Name the parameters whose gradient is not finite, and the ranks that hold it.

    One collective of the ranks of the layout, all of which have seen the same norm.
    """
    here = [] if powers is None else powers.not_finite()
    group = layout.group
    every: list[list[str]] = [here]
    if group is not None:
        every = [[] for _ in range(group.size())]
        dist.all_gather_object(every, here, group=group)
    bad = {name for names in every for name in names}
    named = first_few([name for name in layout.names if name in bad])
    if group is None:
        return f"the gradient's norm is {norm}: {named}"
    ranks = [dist.get_global_rank(group, number) for number, names in enumerate(every) if names]
    return f"the gradient's norm is {norm}: {named} on {ranks_as_text(ranks)}"
