"""What a training calls: callbacks, early stopping, the probe, and what watches skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
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
from runner.train.state import Progress, Window, Windows

log = logging.getLogger(__name__)

MAX_SKIPS = 50  # skipped steps in a row after which a run fails by default
MOST_SAMPLES = 16  # sample indices in a message; the log has all of them


class CallbackError(RuntimeError):
    """A callback raised an exception; the message names the callback and its method."""


HOOKS = ("on_start", "on_microbatch", "on_step", "on_evaluate", "on_end")
"""What a callback may have; one is enough. The first argument is the :class:`runner.Trainer`.

* ``on_start(trainer)`` runs before the first step, also of a run that continues;
* ``on_microbatch(trainer, number, of)`` after a microbatch; for the last one after the step;
* ``on_step(trainer, metrics)`` after a step, with its :class:`runner.telemetry.meter.StepMetrics`;
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
                hooks = ", ".join(HOOKS)
                raise TypeError(f"{name} is no callback: it has none of the methods {hooks}")
            while name in self._named:
                name += "#"
            self._named[name] = each
        self._hooks = {hook: self._having(hook) for hook in HOOKS}

    def _having(self, hook: str) -> list[str]:
        return [name for name, each in self._named.items() if callable(getattr(each, hook, None))]

    def ask(self, reason: str) -> None:
        self._asked = self._asked or reason

    def call(self, hook: str, *args: Any) -> None:
        for name in self._hooks[hook]:
            try:
                getattr(self._named[name], hook)(*args)
            except Exception as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise CallbackError(f"callback {name} failed in {hook}: {why}") from error
        # Microbatches are no place to end, and too many for a collective each.
        if self._hooks[hook] and hook != "on_microbatch" and self.ended is None:
            self._agree()

    def _agree(self) -> None:
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

    def __init__(self, elements: int, say: Callable[[str], None] = print) -> None:
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
    """What is kept of a step until it is known whether its gradient is finite."""

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
            message = f"step {step.number}: {self._describe(step, error.finding, float(loss))}"
            raise NonFiniteGradient(message, error.advice, error.norm) from None
        if decision.finite is not True:
            self._flush = decision.finite is False
            self._steps[step.number] = step._replace(powers=optimizer.powers)
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
                found = "the norm of the gradient is a spike: "
                self._skipped(number, found + rounded(values.norm), values.norm, "spike")
            elif step is None or math.isfinite(values.norm):
                self.in_a_row = 0
            else:
                self._not_finite(step, values)

    def state_dict(self) -> dict[str, Any]:
        reported = sorted(self._reported)
        return {"in_a_row": self.in_a_row, "reported": reported, "searches": self.searches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.searches = state["in_a_row"], state["searches"]
        self._reported = set(state["reported"])

    def _not_finite(self, step: _Step, values: StepValues) -> None:
        taken = self._booster.nonfinite == "ignore" and step.scale is None
        # All ranks have to agree. The loss of one that does not have it is zero.
        bad_loss = [float(not math.isfinite(values.loss))]
        scaled = step.scale is not None and step.scale > 1.0
        if scaled and self._booster.plugin.sum_over_data(bad_loss) == [0.0]:
            self.searches += 1  # it only shows that the loss scale is too large
            return
        last = not taken and self.in_a_row + 1 == self._max_skips
        told, found = "gradient" in self._reported and not last, ""
        if not told:
            found = finding(self._optimizer.layout, step.powers, values.norm)
            found = self._describe(step, found, values.loss)
        if not taken:
            self._skipped(step.number, found, values.norm, "gradient")
        elif not told:
            self._warn("gradient", f"step {step.number} was taken with a bad gradient: {found}")

    def _skipped(self, number: int, found: str, norm: float, kind: str) -> None:
        """Count a skipped step; warn of the first one of a kind; fail at the end of a long row."""
        self.in_a_row += 1
        if self.in_a_row == self._max_skips:
            row = f"{self.in_a_row} steps in a row were skipped, up to step {number}"
            rate = rounded(float(self._optimizer.param_groups[0]["lr"]))
            half = self._booster.dtype in (torch.float16, torch.bfloat16)
            advice = f"try a lower learning rate (now {rate}), a longer warm-up of it"
            advice += ", or precision=fp32" if half else ""
            advice += "; clip.max_skips sets how many skipped steps end a run"
            self._failure = NonFiniteGradient(f"{row}: {found}", advice, norm)
        elif kind not in self._reported:
            ends = ""
            if self._max_skips is not None:
                ends = f". {self._max_skips} skipped steps in a row (clip.max_skips) end the run"
            self._warn(kind, f"step {number} was skipped: {found}{ends}")

    def _warn(self, kind: str, message: str) -> None:
        self._reported.add(kind)
        if self._booster.plugin.rank == 0:
            log.warning("%s", message)

    def _describe(self, step: _Step, found: str, loss: float) -> str:
        """Describe the gradient of a step in one line, the same on every rank; a collective."""
        plugin = self._booster.plugin
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
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return f"{text}. Only loaders of plugin.prepare_dataloader tell the step's samples"
        samples = [str(index) for part in known for rank in data_ranks for index in part[rank]]
        if plugin.rank == 0:
            log.info("samples of step %d: %s", step.number, ", ".join(samples))
        return f"{text}. Its samples: {first_few(samples, MOST_SAMPLES)}"
