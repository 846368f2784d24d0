"""Notice skipped steps: say where a gradient that is not finite came from, and end a run of skips.

On a CPU, and wherever the host decides whether a step is taken, such a step is known at once. On an
accelerator whose fused optimizer decides for itself, the host learns of it with the next transfer
of metrics (``log.flush`` steps at most); no step waits for that. Until then the loss of each
microbatch and one number for each parameter of this rank stay on the device for each step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.booster import NonFiniteGradient, OptimizerWrapper, Plugin
from runner.booster.nonfinite import Nonfinite
from runner.clip import ClipMode, Decision
from runner.clip.norms import Powers
from runner.config.notation import rounded
from runner.telemetry.gauges import Gauges
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepValues
from runner.train.bad_gradient_report import Description, RankReport, advice_on_skips, describe
from runner.train.forward_order import ForwardOrder
from runner.train.gradient_trace import GradientTrace
from runner.train.passes import Passes
from runner.train.progress import Progress
from runner.train.windows import Window, Windows

log = logging.getLogger(__name__)

MAX_SKIPS = 50
"""Number of skipped steps in a row after which a run fails by default."""

WARNED = 10
"""Number of skipped steps in a row after which there is a second warning."""

TRACED = 1000
"""Number of steps for which gradients are traced after a bad step of unknown origin."""


@dataclass(frozen=True)
class _Step:
    """What is kept of a step until it is known whether its gradient is finite."""

    number: int
    epoch: int
    first: int  # index of its first microbatch in the epoch
    scale: float | None
    losses: Sequence[Tensor]
    powers: Powers | None
    traced: list[tuple[int, str]] | None
    known: bool  # whether the host knew at once that the gradient is not finite


class BadGradients:
    """Follows the steps of a training that are skipped, or whose gradient is not finite.

    There is a warning, with a description, at the first step that is skipped, and another one when
    10 steps in a row were skipped. After ``max_skips`` of them the run fails. If gradients were
    combined over ranks or microbatches before they were checked, the description cannot tell where
    the first bad one came from; from then on gradients are traced until the next bad step (where
    the host decides). With ``nonfinite="error"`` they are always traced, which reads every gradient
    once more in each microbatch.

    An fp16 loss scale that is above 1 makes finite gradients overflow, and is halved after each
    skipped step. Such a step counts as a search for the scale if all losses are finite: it neither
    counts as one of ``max_skips``, nor interrupts a row of them, and there is no warning. At a
    scale of 1 the overflow is the training's own, and counts.

    A step that a rule on spikes skips counts as one of ``max_skips`` too, whichever of both kinds
    the steps beside it are. There is a warning at the first one of this process.

    Args:
        plugin: how the model is spread over ranks.
        optimizer: the boosted optimizer.
        passes: knows the loss of each microbatch.
        windows: knows which samples a microbatch holds.
        order: order of the parameters in the forward pass.
        nonfinite: what is done with a step whose gradient is not finite.
        max_skips: number of skipped steps in a row after which the run fails; None for never.
        precision: dtype of the forward pass, or None for full precision; for the advice.

    Attributes:
        in_a_row: number of steps skipped in a row up to now.
        reported: whether there was a warning.
        searches: number of skipped steps that searched the loss scale.
    """

    def __init__(
        self,
        plugin: Plugin,
        optimizer: OptimizerWrapper,
        passes: Passes,
        windows: Windows,
        order: ForwardOrder,
        nonfinite: Nonfinite,
        max_skips: int | None,
        precision: torch.dtype | None,
    ) -> None:
        if max_skips is not None and max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, or None for never, not {max_skips}")
        self._plugin = plugin
        self._optimizer = optimizer
        self._passes = passes
        self._windows = windows
        self._order = order
        self._nonfinite = nonfinite
        self._max_skips = max_skips
        self._precision = precision
        self.in_a_row = 0
        self.reported = False
        self.searches = 0
        self._reported_spike = False
        self._steps: dict[int, _Step] = {}
        self._flush = False
        self._failure: NonFiniteGradient | None = None
        self._trace = GradientTrace(optimizer.layout, lambda: len(passes.losses) + 1)
        self._traced_until = math.inf

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps that are taken in this block; at its end no hooks are left."""
        self._order.start()
        if self._nonfinite == "error" and self._optimizer.loss_scale is None:
            self._trace.start()
        try:
            yield
        finally:
            self._order.stop()
            self._trace.stop()

    def clip(
        self, mode: ClipMode, before: Progress, window: Window, gauges: Gauges | None = None
    ) -> Decision:
        """Clip the gradients of a step, and keep what describes them if they are not finite.

        Where the optimizer's step can clip, it will, see :meth:`OptimizerWrapper.clip`.

        Args:
            mode: how to clip.
            before: counts before the step.
            window: microbatches of the step.
            gauges: what measures this step, if anything does.

        Raises:
            NonFiniteGradient: they are not finite and ``nonfinite`` is ``error``. It names ranks
                and parameters, the same on every rank.
        """
        if self._order.hooks:
            self._order.stop()
        try:
            reads = {} if gauges is None else gauges.reads
            decision = self._optimizer.clip(mode, fold=True, **reads)
        except NonFiniteGradient as error:
            step = self._kept(before, window, known=True)
            found = self._describe(step, error.norm).with_samples()
            message = f"step {step.number}: {found}"
            raise NonFiniteGradient(message, error.advice, error.norm) from None
        if decision.finite is not True:
            self._flush = decision.finite is False
            self._steps[before.step + 1] = self._kept(before, window, known=self._flush)
        if self._trace.hooks:
            self._trace.end_step()
            if before.step + 1 >= self._traced_until:
                self._trace.stop()
        return decision

    def check(self, meter: Meter) -> None:
        """End the run if too many steps in a row were skipped.

        Call this after each step, unless the host knows that its gradient is finite.

        Args:
            meter: has the metrics of the step; they are flushed if the step is known to be bad.

        Raises:
            NonFiniteGradient: too many steps were skipped, on every rank.
        """
        if self._flush:
            self._flush = False
            meter.flush()
        if self._failure is not None:
            raise self._failure

    def follow(self, steps: Sequence[tuple[int, StepValues]]) -> None:
        """Take the values of steps that have left the device; every rank calls this alike.

        Args:
            steps: pairs of the number of a step and its values.
        """
        for number, values in steps:
            step = self._steps.pop(number, None)
            if values.spike:
                self._spike(number, values.norm)
            elif step is None or math.isfinite(values.norm):
                self.in_a_row = 0
            else:
                self._not_finite(step, values.norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; metrics have to be flushed before."""
        return {
            "in_a_row": self.in_a_row,
            "reported": self.reported,
            "searches": self.searches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self.in_a_row = state["in_a_row"]
        self.reported = state["reported"]
        self.searches = state["searches"]

    def _kept(self, before: Progress, window: Window, known: bool) -> _Step:
        """Return what describes a step whose gradient is not finite, or may not be."""
        loss_scale = self._optimizer.loss_scale
        return _Step(
            before.step + 1,
            before.epoch,
            window.first,
            None if loss_scale is None else loss_scale.scale,
            list(self._passes.losses),
            self._optimizer.powers,
            self._trace.found() if known and self._trace.hooks else None,
            known,
        )

    def _spike(self, number: int, norm: float) -> None:
        """Count a step that was skipped as a spike, and warn of the first one and of a long row."""
        self.in_a_row += 1
        rule = self._optimizer.skip
        assert rule is not None
        skipped = f"{self.in_a_row} steps in a row were skipped, up to step {number}"
        found = f"the {rule.of_what} is a spike, the gradient's norm is {rounded(norm)}"
        if self.in_a_row == self._max_skips:
            advice = advice_on_skips(float(self._optimizer.param_groups[0]["lr"]), self._precision)
            self._failure = NonFiniteGradient(f"{skipped}: {found}", advice, norm)
        elif self._plugin.rank == 0 and (self.in_a_row == WARNED or not self._reported_spike):
            what = skipped if self.in_a_row == WARNED else f"step {number} was skipped"
            log.warning("%s: %s%s", what, found, self._ending())
        self._reported_spike = True

    def _ending(self) -> str:
        """Say after a warning how many skipped steps end the run."""
        if self._max_skips is None:
            return ""
        return f". {self._max_skips} skipped steps in a row (clip.max_skips) end the run"

    def _not_finite(self, step: _Step, norm: float) -> None:
        """Count a step whose gradient is not finite, and warn of it."""
        number = step.number
        if self._nonfinite == "ignore" and step.scale is None:
            if not self.reported:
                self._warn(f"step {number} was taken with a bad gradient", step, norm)
            return
        if self._searches_scale(step):
            self.searches += 1
            return
        self.in_a_row += 1
        if self.in_a_row == self._max_skips:
            found = self._describe(step, norm).text
            skipped = f"{self.in_a_row} steps in a row were skipped, up to step {number}"
            rate = float(self._optimizer.param_groups[0]["lr"])
            advice = advice_on_skips(rate, self._precision)
            self._failure = NonFiniteGradient(f"{skipped}: {found}", advice, norm)
        elif self.in_a_row == WARNED:
            self._warn(f"{WARNED} steps in a row were skipped, up to step {number}", step, norm)
        elif not self.reported or step.traced is not None:
            self._warn(f"step {number} was skipped", step, norm)

    def _searches_scale(self, step: _Step) -> bool:
        """Return whether a skipped step only shows that the loss scale is too large."""
        if step.scale is None or step.scale <= 1.0:
            return False
        bad = sum(not math.isfinite(loss) for loss in step.losses)
        # All ranks have to agree. One that does not have the loss has zeros.
        return self._plugin.sum_over_data([float(bad)]) == [0.0]

    def _warn(self, what: str, step: _Step, norm: float) -> None:
        """Log a warning that describes ``step``; trace gradients if its origin is not known."""
        self.reported = True
        found = self._describe(step, norm)
        end = ""
        if self._trace.hooks:
            self._trace.stop()
        elif not found.located and step.known and self._nonfinite != "error":
            self._trace.start()
            self._traced_until = step.number + TRACED
            end = ". The next bad step is traced to its rank and microbatch"
        if self._nonfinite != "ignore":
            end += self._ending()
        if self._plugin.rank == 0:
            log.warning("%s: %s%s", what, found.with_samples(), end)

    def _describe(self, step: _Step, norm: float) -> Description:
        """Describe the gradient of a step; a collective of all ranks."""
        found = describe(self._reports(step), norm, lambda k: self._samples(step, k))
        if self._plugin.rank == 0 and found.samples is not None:
            log.info("step %d, samples of the bad microbatch: %s", step.number, found.samples)
        return found

    def _reports(self, step: _Step) -> list[RankReport]:
        sizes = [
            (float(torch.linalg.vector_norm(shard.weight, math.inf)), shard.name)
            for shard in self._optimizer.layout.shards
            if shard.weight.numel()
        ]
        mine = RankReport(
            self._plugin.rank,
            self._plugin.data_rank,
            self._order.positions(),
            [] if step.powers is None else step.powers.not_finite(),
            [name for size, name in sizes if not math.isfinite(size)],
            max((one for one in sizes if math.isfinite(one[0])), default=(0.0, "")),
            [float(loss) for loss in step.losses],
            step.traced,
        )
        if self._plugin.world_size == 1:
            return [mine]
        every: list[Any] = [None] * self._plugin.world_size
        dist.all_gather_object(every, mine)
        return every

    def _samples(self, step: _Step, microbatch: int) -> list[list[int]] | None:
        return self._windows.indices(step.epoch, step.first + microbatch - 1)
