"""What a training calls: callbacks, early stopping, the probe, and what watches skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from runner.booster import Booster, NonFiniteGradient, OptimizerWrapper, Plugin
from runner.booster.step_order import finding
from runner.clip import ClipMode, Decision, Number
from runner.clip.norms import Powers
from runner.clip.shard import local
from runner.config.notation import first_few, higher_is_better, plural, ranks_as_text, rounded
from runner.config.problem import or_list
from runner.data.stream import has_state
from runner.run_folder import keys
from runner.telemetry.meter import Meter, StepValues
from runner.telemetry.sinks.console import print_line
from runner.train.state import Progress, Window, Windows

log = logging.getLogger(__name__)

MOST_SAMPLES = 16  # sample indices in a message; the log has all of them


HOOKS = ("on_start", "on_microbatch", "on_step", "on_evaluate", "on_end")
"""What a callback may have; one is enough. The first argument is the :class:`runner.Trainer`.

* ``on_start(trainer)`` runs before the first step, also of a run that continues;
* ``on_microbatch(trainer, number, of)`` after a microbatch; for the last one after the step;
* ``on_step(trainer, metrics)`` after a step, with its :class:`runner.telemetry.meter.StepMetrics`,
  whose ``local_loss`` is the part of this rank: ``trainer.loss_of(metrics)`` is that of the step;
* ``on_evaluate(trainer, metrics)`` after an evaluation; its metrics are the same on every rank;
* ``on_end(trainer, summary)`` after the last step and the final weights, not if a training fails.

One with ``state_dict`` and ``load_state_dict`` is saved in checkpoints and continued.
"""


class Callbacks:
    """Calls callbacks; ``ended`` is why they end the training early, the same on all ranks."""

    def __init__(self, callbacks: Sequence[object], plugin: Plugin) -> None:
        self._plugin = plugin
        self._asked: str | None = None
        self.ended: str | None = None
        self._named: dict[str, Any] = {}
        for each in callbacks:
            name = f"{type(each).__module__}.{type(each).__qualname__}"
            if not any(callable(getattr(each, hook, None)) for hook in HOOKS):
                raise TypeError(f"{name} is no callback: it has none of {', '.join(HOOKS)}")
            while name in self._named:
                name += "#"
            self._named[name] = each

    def ask(self, reason: str) -> None:
        self._asked = self._asked or reason

    def call(self, hook: str, *args: Any) -> None:
        if not self._named:
            return
        having = [name for name, each in self._named.items() if callable(getattr(each, hook, None))]
        for name in having:
            getattr(self._named[name], hook)(*args)
        # Microbatches are no place to end, and too many for a collective each.
        if not having or hook == "on_microbatch" or self.ended is not None:
            return
        reasons = [self._asked] * (ranks := self._plugin.world_size)
        if ranks > 1 and any(self._plugin.sum_over_ranks([float(self._asked is not None)])):
            dist.all_gather_object(reasons, self._asked)
        self.ended = next((reason for reason in reasons if reason is not None), None)
        if self.ended is not None and self._plugin.rank == 0:
            log.info("the training ends early: %s", self.ended)

    def state_dict(self) -> dict[str, Any]:
        named = self._named.items()
        return {name: each.state_dict() for name, each in named if has_state(each)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, each in self._named.items():
            if name in states and has_state(each):
                each.load_state_dict(states[name])


class Probe:
    """Prints the first weights after each microbatch, to see which of them changes the model."""

    def __init__(self, elements: int, say: Callable[[str], None] = print_line) -> None:
        self._elements, self._say = elements, say

    def on_microbatch(self, trainer: Any, number: int, of: int) -> None:
        if trainer.plugin.rank == 0:
            first = local(next(trainer.model.unwrap().parameters()).detach()).flatten()
            values = " ".join(f"{x:+.6f}" for x in first[: self._elements].tolist())
            step = trainer.state.progress.step + 1
            self._say(f"step {step} microbatch {number}/{of}: {values}")


class EarlyStopping:
    """Ends the training after so many evaluations without an improvement: ``early_stopping``."""

    def __init__(
        self,
        patience: int,
        metric: str = keys.EVAL_LOSS,
        min_delta: float = 0.0,
        direction: str | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, not {patience}")
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self._higher = direction == "maximize" if direction else higher_is_better(metric)
        self.best, self.best_step, self.waited = math.nan, 0, 0

    def on_start(self, trainer: Any) -> None:
        self._end_if_due(trainer)  # a run that continues after it was to end

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            raise ValueError(f"there is no {self.metric}; evaluations have {or_list(metrics)}")
        value = metrics[self.metric]
        gain = value - self.best if self._higher else self.best - value
        better = math.isnan(self.best) or (gain > 0 and gain >= self.min_delta)
        if math.isfinite(value) and better:
            self.best, self.best_step, self.waited = value, trainer.state.progress.step, 0
        else:
            self.waited += 1
        self._end_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.waited = (state[key] for key in self.state_dict())

    def _end_if_due(self, trainer: Any) -> None:
        if self.waited >= self.patience:
            more = f" by {self.min_delta:g}" if self.min_delta else ""
            often = f"{more} in {plural(self.waited, 'evaluation')}"
            best = f"(best {self.best:.6g} at step {self.best_step})"
            trainer.end_early(f"{self.metric} did not improve{often} {best}")


class _Step(NamedTuple):
    number: int
    epoch: int
    microbatches: range  # indices in the epoch
    scale: float | None
    powers: Powers | None


class SkippedSteps:
    """Warns of steps that are skipped, and ends a training that skips too many of them in a row.

    Every :class:`runner.Trainer` has one; ``callbacks=[SkippedSteps(max_skips=20)]`` gives another.
    A gradient that is not finite is reported at once where the host decides whether a step is
    taken; else with the next transfer of metrics, so that no step waits for it.

    Args:
        max_skips: number of skipped steps in a row after which the run fails; None for never.

    Attributes:
        in_a_row: number of skipped steps up to now, without one that was taken in between.
        searches: number of steps that were skipped to find the fp16 loss scale.

    Raises:
        ValueError: ``max_skips`` is less than 1.
    """

    def __init__(self, max_skips: int | None = 50) -> None:
        if max_skips is not None and max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, or None for never, not {max_skips}")
        self._max_skips = max_skips
        self.in_a_row = self.searches = 0
        self._reported: set[str] = set()  # "spike" and "gradient", once one was
        self._steps: dict[int, _Step] = {}
        self._flush = False
        self._failure: NonFiniteGradient | None = None

    def of(self, booster: Booster, optimizer: OptimizerWrapper, windows: Windows) -> Self:
        self._booster, self._optimizer, self._windows = booster, optimizer, windows
        return self

    def clip(
        self, mode: ClipMode, before: Progress, window: Window, loss: Number, each: bool
    ) -> Decision:
        """Clip the gradients of a step, and keep what describes them if they are not finite."""
        optimizer, scaling = self._optimizer, self._optimizer.loss_scale
        scale = None if scaling is None else scaling.scale
        microbatches = range(window.first, window.first + len(window.batches))
        step = _Step(before.step + 1, before.epoch, microbatches, scale, None)
        try:
            decision = optimizer.clip(mode, fold=True, each=each)
        except NonFiniteGradient as error:
            message = f"step {step.number}: {self._describe(step, float(loss), error.finding)}"
            raise NonFiniteGradient(message, error.advice, error.norm) from None
        if decision.finite is not True:
            self._flush = decision.finite is False
            self._steps[step.number] = step._replace(powers=optimizer.powers)
        return decision

    def check(self, meter: Meter) -> None:
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
                found = f"the norm of the gradient is a spike: {rounded(values.norm)}"
                self._report("spike", number, values.norm, partial(str, found))
            elif step is None or math.isfinite(values.norm):
                self.in_a_row = 0
            elif self._searches(step, values.local_loss):
                self.searches += 1
            else:
                describe = partial(self._describe, step, values.local_loss, norm=values.norm)
                taken = self._booster.nonfinite == "ignore" and step.scale is None
                self._report("gradient", number, values.norm, describe, taken)

    def state_dict(self) -> dict[str, Any]:
        reported = sorted(self._reported)
        return {"in_a_row": self.in_a_row, "reported": reported, "searches": self.searches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.searches = state["in_a_row"], state["searches"]
        self._reported = set(state["reported"])

    def _searches(self, step: _Step, loss: float) -> bool:
        """Return whether a step only shows that the loss scale is too large."""
        if step.scale is None or step.scale <= 1.0:
            return False
        # All ranks have to agree. The loss of one that does not have it is zero.
        return self._booster.plugin.sum_over_data([float(not math.isfinite(loss))]) == [0.0]

    def _report(
        self, kind: str, number: int, norm: float, describe: Callable[[], str], taken: bool = False
    ) -> None:
        """Count a skipped step; warn of the first one of a kind; fail at the end of a long row."""
        self.in_a_row += not taken
        last = not taken and self.in_a_row == self._max_skips
        if kind in self._reported and not last:
            return
        self._reported.add(kind)
        found, most = describe(), self._max_skips
        if last:
            row = f"{self.in_a_row} steps in a row were skipped, up to step {number}"
            rate = rounded(float(self._optimizer.param_groups[0]["lr"]))
            half = self._booster.dtype in (torch.float16, torch.bfloat16)
            advice = f"try a lower learning rate (now {rate}), a longer warm-up of it"
            advice += ", or precision=fp32" if half else ""
            advice += "; clip.max_skips sets how many skipped steps end a run"
            self._failure = NonFiniteGradient(f"{row}: {found}", advice, norm)
        elif self._booster.plugin.rank == 0:
            done = "taken with a bad gradient" if taken else "skipped"
            ends = f". {most} skipped steps in a row (clip.max_skips) end the run"
            ends = "" if taken or most is None else ends
            log.warning("step %d was %s: %s%s", number, done, found, ends)

    def _describe(self, step: _Step, loss: float, found: str = "", norm: float = 0.0) -> str:
        """Describe the gradient of a step in one line, the same on every rank; a collective."""
        plugin = self._booster.plugin
        found = found or finding(self._optimizer.layout, step.powers, norm)
        mine = (plugin.rank, plugin.data_rank, not math.isfinite(loss), found)
        reports = [mine] * plugin.world_size
        if plugin.world_size > 1:
            dist.all_gather_object(reports, mine)
        text = reports[0][3]
        # Ranks have combined their gradients: only the losses tell whose samples are at fault.
        at_fault = [report for report in reports if report[2]]
        if at_fault and len(reports) > 1:
            text += f", from {ranks_as_text([rank for rank, *_ in at_fault])}"
        text += ". A loss is not finite" if at_fault else ". All losses are finite"
        data_ranks = sorted({data_rank for _, data_rank, *_ in at_fault or reports})
        parts = [self._windows.indices(step.epoch, number) for number in step.microbatches]
        samples = [str(index) for part in parts if part for at in data_ranks for index in part[at]]
        if None in parts:
            return f"{text}. Only loaders of plugin.prepare_dataloader tell the step's samples"
        if plugin.rank == 0:
            log.info("samples of step %d: %s", step.number, ", ".join(samples))
        return f"{text}. Its samples: {first_few(samples, MOST_SAMPLES)}"
