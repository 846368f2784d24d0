"""Clipping by value, with the count of what it clipped and the norms before and after."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from runner.bench.pairs import interleave
from runner.bench.subjects import SCALE, clipping, subjects
from runner.bench.table import Row, Setting, compared

TITLE = (
    "clipping by value, with its count and both norms, one thread\n"
    "1.00 is torch.nn.utils.clip_grad_value_(foreach=True), which counts and measures nothing"
)

SHARES = {"10 % clipped": 1.645 * SCALE, "nothing clipped": 1e3}
"""Thresholds for normally distributed gradients, by the share of elements that they clip."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model and threshold."""
    for subject in subjects(setting):
        for share, threshold in SHARES.items():
            torchs = partial(nn.utils.clip_grad_value_, subject.parameters, threshold, foreach=True)
            ours = clipping(subject, setting, "value", threshold=threshold)
            times = interleave({"torch": subject.side(torchs), "ours": ours}, setting.pairs())
            yield compared(f"{subject.name}, {share}", times, "ours", "torch", 1.5)
