"""The work of one rank in a verification: both sides step by step, one mode after another."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.booster import NonFiniteGradient
from runner.config.schema import RunConfig
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.sinks.sink import Sink
from runner.train import build
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
from runner.verify.reference import Reference, Windows
from runner.verify.result import outcome, row_of

BINDS = 0.1
"""Ratio of a derived threshold to the largest value of the first step that is compared with it."""


def execute(config: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Compare the plugin with one process in each mode of ``verify.modes``."""
    if build.device_of(config.device).type == "cuda" and config.verify.dtype == "float32":
        # cuDNN uses TF32 by default, which has ten bits of mantissa.
        torch.backends.cudnn.allow_tf32 = False
    settled = setting.comparable(config)
    modes = config.verify.modes or [config.clip.mode]
    try:
        with _quiet():
            compared = [_compare(settled, name, i, sinks) for i, name in enumerate(modes)]
    except NonFiniteGradient as error:
        error.advice = ""  # clip.nonfinite=skip does not help here
        error.add_note(
            "a verification compares every step and leaves none out, whatever clip.nonfinite is"
        )
        raise
    except Exception as error:
        if config.verify.dtype == "float64" and setting.needs_float32(config):
            error.add_note("the model computes in float32 only: use verify.dtype=float32")
        raise
    finally:
        for sink in sinks:
            sink.close(None, 0)
    here = [one for one in compared if one is not None]
    return outcome(config, here, setting.notes(config, here[-1].dropped)) if here else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's warnings about slow redistribution: speed does not matter here."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _compare(config: RunConfig, name: str, number: int, sinks: Sequence[Sink]) -> Compared | None:
    """Train both sides in one clipping mode."""
    plugin = build.make_plugin(config)
    mode, derived = setting.make_mode(config, name)
    losses = _Losses()
    data = setting.samples(config, plugin.data_size)
    trainer = watch.make_trainer(config, plugin, data, mode, *([] if plugin.rank else [losses]))
    pipeline = trainer.model.pipeline
    chunks = 1 if pipeline is None else pipeline.microbatches

    def one_process() -> Reference:
        again, _ = setting.make_mode(config, name)  # a mode is bound to one layout
        again.threshold = mode.threshold
        return Reference(Windows(config, plugin.data_size, chunks, data), again)

    if derived:
        peak = math.nan if plugin.rank else one_process().peak()
        mode.threshold = watch.from_all(peak)[0] * BINDS
    reference = None if plugin.rank else one_process()
    steps: list[ComparedStep] = []

    def seen(
        ranks: list[SideMetrics], gradients: dict[str, Tensor], by_hand: list[Naive | None]
    ) -> None:
        assert reference is not None
        steps.append(_compared(len(steps) + 1, ranks, gradients, by_hand, reference))
        for sink in sinks:
            sink.write(row_of(steps[-1], number, mode.threshold))

    trainer.state.mode = watch.Watched(mode, trainer, seen)
    trainer.fit()
    layout = trainer.optimizer.layout
    drifted, placed = watch.drifted(layout), watch.placements(layout)
    weights = watch.whole(trainer, lambda p: p)
    if reference is None:
        return None
    wanted = reference.weights()
    weights = {name: tensor for name, tensor in weights.items() if name in wanted}
    return Compared(
        mode=name,
        threshold=mode.threshold,
        derived=derived,
        steps=steps,
        weights=tensor_errors(weights, wanted),
        drifted=drifted,
        placed=placed,
        losses=losses,
        causes=list(_causes(config, reference, losses[0], steps[0].loss)),
        dropped=reference.dropped,
    )


def _compared(
    number: int,
    ranks: list[SideMetrics],
    gradients: dict[str, Tensor],
    by_hand: list[Naive | None],
    reference: Reference,
) -> ComparedStep:
    """Take a step of one process, and compare it with that of the plugin."""
    metrics, loss, wanted = reference.step()
    return ComparedStep(
        step=number,
        plugin=ranks[0],
        reference=metrics,
        gradients=tensor_errors(gradients, wanted),
        disagreeing=disagreements(number, ranks),
        present=presence(number, gradients, wanted),
        naive=naive.worst(by_hand, metrics.norm),
        loss=loss,
    )


def _causes(config: RunConfig, reference: Reference, ours: float, theirs: float) -> Iterator[str]:
    """Yield reasons other than a fault of the plugin why the sides may differ."""
    yield from reference.causes()
    if not relative(ours, theirs) <= config.verify.bound:
        yield (
            f"the losses of step 1 differ already ({ours!r}, one process {theirs!r}): "
            "look at the forward pass or the batches rather than at clipping"
        )
    if config.verify.dtype == "float32":
        yield "float32 rounds: verify.dtype=float64 tells rounding from a fault"


class _Losses(list[float]):
    """A sink that keeps the loss of each step."""

    def write(self, row: Row) -> None:
        self.append(float(row[keys.TRAIN_LOSS]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass
