"""Notice skipped steps: report gradients that are not finite, and end a long row of skips.

Where the host decides whether a step is taken, such a step is known at once. On an accelerator
whose fused optimizer decides for itself, the host learns of it with the next transfer of metrics;
no step waits for that. Until then one number for each parameter of this rank stays on the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from runner.booster import Booster, NonFiniteGradient, OptimizerWrapper
from runner.clip import ClipMode, Decision, Number
from runner.clip.norms import Powers
from runner.config.notation import first_few, ranks_as_text, rounded
from runner.telemetry.meter import Meter, StepValues
from runner.train.state import Progress, Window, Windows

log = logging.getLogger(__name__)

MAX_SKIPS = 50  # skipped steps in a row after which a run fails by default
MOST_SAMPLES = 16  # sample indices in a message; the log has all of them


class _Step(NamedTuple):
    """What is kept of a step until it is known whether its gradient is finite."""

    number: int
    epoch: int
    microbatches: range  # indices in the epoch
    scale: float | None
    powers: Powers | None


class SkippedSteps:
    """Warns of steps that are skipped, and ends a training that skips too many of them in a row.

    Every :class:`runner.Trainer` has one; ``callbacks=[SkippedSteps(max_skips=20)]`` gives another.

    Args:
        max_skips: number of skipped steps in a row after which the run fails; None for never.

    Attributes:
        in_a_row: number of skipped steps up to now, without one that was taken in between.
        searches: number of steps that were skipped to find the fp16 loss scale.

    Raises:
        ValueError: ``max_skips`` is less than 1.
    """

    def __init__(self, max_skips: int | None = MAX_SKIPS) -> None:
        if max_skips is not None and max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, or None for never, not {max_skips}")
        self._max_skips = max_skips
        self.in_a_row = self.searches = 0
        self._reported: set[str] = set()  # "spike" and "gradient", once one was
        self._steps: dict[int, _Step] = {}
        self._flush = False
        self._failure: NonFiniteGradient | None = None

    def of(self, booster: Booster, optimizer: OptimizerWrapper, windows: Windows) -> Self:
        self._booster, self._plugin = booster, booster.plugin
        self._optimizer, self._windows = optimizer, windows
        return self

    def clip(
        self, mode: ClipMode, before: Progress, window: Window, loss: Number, each: bool
    ) -> Decision:
        """Clip the gradients of a step, and keep what describes them if they are not finite."""
        scaling = self._optimizer.loss_scale
        scale = None if scaling is None else scaling.scale

        def step() -> _Step:
            microbatches = range(window.first, window.first + len(window.batches))
            number, powers = before.step + 1, self._optimizer.powers
            return _Step(number, before.epoch, microbatches, scale, powers)

        try:
            decision = self._optimizer.clip(mode, fold=True, each=each)
        except NonFiniteGradient as error:
            found = self._describe(step(), error.norm, float(loss))
            message = f"step {before.step + 1}: {found}"
            raise NonFiniteGradient(message, error.advice, error.norm) from None
        if decision.finite is not True:
            self._flush = decision.finite is False
            self._steps[before.step + 1] = step()
        return decision

    def check(self, meter: Meter) -> None:
        """End the run if too many steps in a row were skipped."""
        if self._flush:
            self._flush = False
            meter.flush()
        if self._failure is not None:
            raise self._failure

    def follow(self, steps: Sequence[tuple[int, StepValues]]) -> None:
        """Take the values of steps that have left the device; every rank calls this alike."""
        for number, values in steps:
            step = self._steps.pop(number, None)
            if values.spike:
                rule = self._optimizer.skip
                assert rule is not None
                found = f"the {rule.of_what} is a spike, the gradient's norm is "
                self._skipped(number, found + rounded(values.norm), values.norm, "spike")
            elif step is None or math.isfinite(values.norm):
                self.in_a_row = 0
            else:
                self._not_finite(step, values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_a_row": self.in_a_row,
            "reported": sorted(self._reported),
            "searches": self.searches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.searches = state["in_a_row"], state["searches"]
        self._reported = set(state["reported"])

    def _not_finite(self, step: _Step, values: StepValues) -> None:
        taken = self._booster.nonfinite == "ignore" and step.scale is None
        scaled = step.scale is not None and step.scale > 1.0
        # All ranks have to agree. The loss of one that does not have it is zero.
        bad_loss = not math.isfinite(values.loss)
        if scaled and self._plugin.sum_over_data([float(bad_loss)]) == [0.0]:
            self.searches += 1  # it only shows that the loss scale is too large
            return
        last = not taken and self.in_a_row + 1 == self._max_skips
        told = "gradient" in self._reported and not last
        found = "" if told else self._describe(step, values.norm, values.loss)
        if not taken:
            self._skipped(step.number, found, values.norm, "gradient")
        elif not told:
            self._reported.add("gradient")
            self._warn("step %d was taken with a bad gradient: %s", step.number, found)

    def _skipped(self, number: int, found: str, norm: float, kind: str) -> None:
        """Count a skipped step; warn of the first one of a kind; fail at the end of a long row."""
        self.in_a_row += 1
        if self.in_a_row == self._max_skips:
            row = f"{self.in_a_row} steps in a row were skipped, up to step {number}"
            rate = rounded(float(self._optimizer.param_groups[0]["lr"]))
            half = self._booster.dtype in (torch.float16, torch.bfloat16)
            advice = (
                f"try a lower learning rate (now {rate}), a longer warm-up of it"
                f"{', or precision=fp32' if half else ''}; clip.max_skips sets how many skipped "
                "steps end a run"
            )
            self._failure = NonFiniteGradient(f"{row}: {found}", advice, norm)
        elif kind not in self._reported:
            self._reported.add(kind)
            ends = ""
            if self._max_skips is not None:
                ends = f". {self._max_skips} skipped steps in a row (clip.max_skips) end the run"
            self._warn("step %d was skipped: %s%s", number, found, ends)

    def _warn(self, message: str, *args: object) -> None:
        if self._plugin.rank == 0:
            log.warning(message, *args)

    def _describe(self, step: _Step, norm: float, loss: float) -> str:
        """Describe the gradient of a step in one line, the same on every rank; a collective."""
        plugin = self._plugin
        # Of each rank: itself, its bad parameters, and whether its loss is at fault
        mine = (
            (plugin.rank, plugin.data_rank),
            [] if step.powers is None else step.powers.not_finite(),
            not math.isfinite(loss),
        )
        reports = [mine] * plugin.world_size
        if plugin.world_size > 1:
            dist.all_gather_object(reports, mine)
        found = {name for _, names, _ in reports for name in names}
        bad = [name for name in self._optimizer.layout.names if name in found]
        every = len(bad) == len(self._optimizer.layout.names) > 1
        named = f"all {len(bad)} parameters" if every else first_few(bad)
        text = f"the gradient's norm is {norm}: {named}"
        # A rank with a bad loss is at fault; ranks have combined their gradients before the check.
        at_fault = [rank for rank, _, bad_loss in reports if bad_loss]
        holding = [rank for rank, names, _ in reports if names]
        if at_fault and len(reports) > 1:
            text += f", from {ranks_as_text([rank for rank, _ in at_fault])}"
        elif 0 < len(holding) < len(reports):
            text += f", held by {ranks_as_text([rank for rank, _ in holding])}"
        text += ". A loss is not finite" if at_fault else ". All losses are finite"
        samples = self._samples(step, {data for _, data in at_fault or [r for r, *_ in reports]})
        if samples is None:
            return f"{text}. Only loaders of plugin.prepare_dataloader tell the step's samples"
        if plugin.rank == 0:
            log.info("samples of step %d: %s", step.number, samples)
        return f"{text}. Its samples: {first_few([str(one) for one in samples], MOST_SAMPLES)}"

    def _samples(self, step: _Step, data_ranks: set[int]) -> list[int] | None:
        parts = [self._windows.indices(step.epoch, number) for number in step.microbatches]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return [index for part in known for rank in sorted(data_ranks) for index in part[rank]]
