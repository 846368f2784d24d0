"""The job of a verification on one rank: both sides step by step, one mode after the other."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.booster import Plugin
from runner.clip import ClipMode
from runner.config.schema import RunConfig
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.sinks.sink import Sink
from runner.train import build
from runner.train.trainer import Trainer
from runner.verify import naive, setting, watch
from runner.verify.comparison import (
    Compared,
    ComparedStep,
    Naive,
    SideMetrics,
    disagreements,
    presence,
    relative,
    tensor_errors,
)
from runner.verify.reference import Dealt, Reference
from runner.verify.result import outcome, row_of

BINDS = 0.1
"""Of the largest figure of the first step: a threshold that clips, if not only what is largest."""


def execute(
    config: RunConfig,
    sinks: Sequence[Sink],
    make_plugin: Callable[[RunConfig], Plugin] = build.make_plugin,
) -> dict[str, Any]:
    """Compare the plugin's side with one process, in each of the modes that are asked for.

    Args:
        config: the whole configuration.
        sinks: take a row as each step is compared (see :func:`runner.verify.result.row_of`), and
            are closed at the end; none but on the first rank.
        make_plugin: what makes the plugin, anew for each mode.

    Returns:
        On the first rank what ``verify.json`` holds of the comparison, nothing on the others.

    Raises:
        runner.booster.NonFiniteGradient: a gradient is not finite.
        runner.clip.layout.LayoutError: the plugin's layout does not account for the model.
    """
    try:
        with _quiet():
            return _execute(config, sinks, make_plugin)
    finally:
        for sink in sinks:
            sink.close(None, 0)


def _execute(
    config: RunConfig, sinks: Sequence[Sink], make_plugin: Callable[[RunConfig], Plugin]
) -> dict[str, Any]:
    said = list(setting.notes(config))
    settled = setting.comparable(config)
    device = build.device_of(config.device)
    if device.type == "cuda" and config.verify.dtype == "float32":
        # Ten bits of mantissa are no float32, and cuDNN takes them by default.
        torch.backends.cudnn.allow_tf32 = False
    compared: list[Compared] = []
    causes: dict[str, None] = {}
    for number, name in enumerate(config.verify.modes or [config.clip.mode]):
        side = _Side(settled, make_plugin(settled), name, device)
        shown = [_Numbered(sink, number) for sink in sinks]
        compared += side.compare(shown)
        causes |= dict.fromkeys(side.causes())
    if side.reference is not None and (dropped := side.reference.dropped):
        said.append(f"dropout is off, in {dropped} places: ranks would drop other elements")
    return outcome(config, compared, said, list(causes)) if compared else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's advice on how to gather faster: here whole tensors are gathered to look."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Side:
    """One mode under the plugin on this rank; on the first one, the reference beside it."""

    def __init__(self, config: RunConfig, plugin: Plugin, name: str, device: torch.device) -> None:
        self.config = config
        self.plugin = plugin
        self.name = name
        self.device = device
        self.losses = _Losses()
        self.steps: list[ComparedStep] = []
        self.reference: Reference | None = None
        mode, self.derived = setting.make_mode(config, name)
        first = [self.losses] if plugin.rank == 0 else []
        self.trainer: Trainer = watch.make_trainer(config, plugin, mode, *first)
        pipeline = self.trainer.model.pipeline
        self.dealt = Dealt(plugin.data_size, 1 if pipeline is None else pipeline.microbatches)

    def compare(self, sinks: Sequence[Sink]) -> list[Compared]:
        """Train both sides; on the first rank the comparison, on the others nothing."""
        trainer, first = self.trainer, self.plugin.rank == 0
        mode = trainer.state.mode
        if self.derived:
            probe = Reference(self.config, self.dealt, self._mode(), self.device) if first else None
            mode.threshold = watch.from_first(probe.peak() * BINDS if probe is not None else None)
        if first:
            self.reference = Reference(
                self.config, self.dealt, self._mode(mode.threshold), self.device
            )

        def seen(
            ranks: list[SideMetrics], gradients: dict[str, Tensor], by_hand: list[Naive | None]
        ) -> None:
            self._take_step(ranks, gradients, by_hand)
            for sink in sinks:
                sink.write(row_of(self.steps[-1], mode.threshold))

        trainer.state.mode = watch.Watched(mode, trainer, seen)
        trainer.fit()
        drifted = watch.drifted(trainer.optimizer.layout)
        placed = watch.placements(trainer.optimizer.layout)
        weights = trainer.booster.state_dict(trainer.model)
        if self.reference is None:
            return []
        wanted = self.reference.weights()
        weights = {name: tensor for name, tensor in weights.items() if name in wanted}
        steps = [
            replace(step, loss=(loss, step.loss[1]))
            for step, loss in zip(self.steps, self.losses.each, strict=True)
        ]
        errors = tensor_errors(weights, wanted)
        return [Compared(self.name, mode.threshold, self.derived, steps, errors, drifted, placed)]

    def causes(self) -> Iterator[str]:
        """What, other than a fault of the plugin, may set the sides apart here, in words."""
        reference = self.reference
        if reference is None:
            return
        yield from reference.causes()
        losses = next(((s.loss, s.step) for s in self.steps), None)
        ours = self.losses.each[0] if self.losses.each else math.nan
        if losses is not None and not relative(ours, losses[0][1]) <= self.config.verify.bound:
            yield (
                f"the losses of step 1 differ already ({ours!r}, one process {losses[0][1]!r}): "
                "look at the forward pass or the batches rather than at clipping"
            )
        if self.config.verify.dtype == "float32":
            yield "float32 rounds: verify.dtype=float64 tells rounding from a fault"

    def _mode(self, threshold: float | None = None) -> ClipMode:
        """The mode once more, since one is bound to one layout."""
        mode, _ = setting.make_mode(self.config, self.name)
        if threshold is not None:
            mode.threshold = threshold
        return mode

    def _take_step(
        self, ranks: list[SideMetrics], gradients: dict[str, Tensor], by_hand: list[Naive | None]
    ) -> None:
        assert self.reference is not None
        number = len(self.steps) + 1
        figures, loss, wanted = self.reference.step()
        self.steps.append(
            ComparedStep(
                step=number,
                plugin=ranks[0],
                reference=figures,
                gradients=tensor_errors(gradients, wanted),
                disagreeing=disagreements(number, ranks),
                present=presence(number, gradients, wanted),
                naive=naive.worst(by_hand, figures.norm),
                loss=(math.nan, loss),
            )
        )


class _Losses:
    """A sink that keeps the loss of each step."""

    def __init__(self) -> None:
        self.each: list[float] = []

    def write(self, row: Row) -> None:
        self.each.append(float(row[keys.TRAIN_LOSS]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass


class _Numbered:
    """A sink that is told which of the modes a row is of."""

    def __init__(self, sink: Sink, number: int) -> None:
        self._sink = sink
        self._number = number

    def write(self, row: Row) -> None:
        self._sink.write(row | {"verify/mode": self._number})

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass
