"""Clipping by value, with the count of what it clipped and the norms before and after."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from runner.bench.pairs import interleave, milliseconds, ratio
from runner.bench.subjects import SCALE, Subject, Telemetry, subjects, thread_numbers, threads
from runner.bench.table import Row, Setting
from runner.clip import Layout, build

TITLE = (
    "clipping by value, with its count and both norms\n"
    "1.00 is torch.nn.utils.clip_grad_value_(foreach=True), which counts and measures nothing"
)

SHARES = {"10 % clipped": 1.645 * SCALE, "nothing clipped": 1e3}
"""Thresholds for normally distributed gradients, by the share of elements that they clip."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model, number of threads and threshold."""
    for subject in subjects(setting.device, setting.quick):
        for number, where in thread_numbers(setting.device).items():
            for share, threshold in SHARES.items():
                with threads(number):
                    yield _row(subject, where, share, threshold, setting)


def _row(subject: Subject, where: str, share: str, threshold: float, setting: Setting) -> Row:
    mode, layout = build("value", threshold=threshold), Layout.of_model(subject.model)
    mode.bind(layout)
    telemetry = Telemetry(setting.folder)

    @torch.no_grad()
    def ours() -> None:
        telemetry(mode.clip(layout))

    def torchs() -> None:
        nn.utils.clip_grad_value_(subject.parameters, threshold, foreach=True)

    times = interleave({"torch": subject.side(torchs), "ours": subject.side(ours)}, setting.pairs())
    what = f"{subject.name}, {share}, {where}"
    return Row(what, ratio(times["ours"], times["torch"]), 1.5, ms=milliseconds(times))
