"""What a training calls: callbacks, early stopping, the probe, and what watches skipped steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from runner.booster import Booster, NonFiniteGradient, OptimizerWrapper, Plugin
from runner.booster.step_order import finding
from runner.clip import Decision
from runner.config.notation import first_few, higher_is_better, plural, ranks_as_text, rounded
from runner.config.problem import or_list
from runner.data.stream_samples import has_state
from runner.gradients import transfer
from runner.gradients.norms import Norms
from runner.gradients.shard import local
from runner.run_folder import keys
from runner.run_folder.strict_json import Row
from runner.telemetry.meter import Meter
from runner.telemetry.sinks.console import print_line
from runner.train.progress import Progress
from runner.train.windows import Window, Windows

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_SAMPLES = 16  # sample indices in a message; the log has all of them
MOST_STEPS = 20  # skipped steps in a summary


HOOKS = ("on_start", "on_microbatch", "on_step", "on_evaluate", "on_end")
"""What a callback may have; one is enough. The first argument is the :class:`runner.Trainer`.

* ``on_start(trainer)`` runs before the first step, also of a run that continues;
* ``on_microbatch(trainer, number, of)`` after a microbatch; for the last one after the step;
* ``on_step(trainer, metrics)`` after a step, with its :class:`runner.telemetry.step.StepMetrics`,
  whose ``local_loss`` is the part of this rank: ``trainer.loss_of(metrics)`` is that of the step.
  What it puts into ``metrics.numbers``, by key, stands in the row of the step;
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
        for callback in callbacks:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            if not any(_has(callback, hook) for hook in HOOKS):
                raise TypeError(f"{name} is no callback: it has none of {', '.join(HOOKS)}")
            while name in self._named:
                name += "#"
            self._named[name] = callback

    def ask(self, reason: str) -> None:
        """Ask all ranks to end the training after this step."""
        self._asked = self._asked or reason

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks, then agree over ranks whether the training ends."""
        if not self._named:
            return
        having = [callback for callback in self._named.values() if _has(callback, hook)]
        for callback in having:
            getattr(callback, hook)(*args)
        # Microbatches are no place to end, and too many for a collective each.
        if having and hook != "on_microbatch" and self.ended is None:
            self._agree_on_end()

    def _agree_on_end(self) -> None:
        ranks = self._plugin.world_size
        reasons = [self._asked] * ranks
        if ranks > 1 and any(self._plugin.sum_over_ranks([float(self._asked is not None)])):
            dist.all_gather_object(reasons, self._asked)
        self.ended = next((reason for reason in reasons if reason is not None), None)
        if self.ended is not None and self._plugin.rank == 0:
            log.info("the training ends early: %s", self.ended)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: callback.state_dict()
            for name, callback in self._named.items()
            if has_state(callback)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._named.items():
            if name in states and has_state(callback):
                callback.load_state_dict(states[name])


def first_of(kind: type[T], callbacks: Sequence[object]) -> T | None:
    """Return the first callback of a kind; None if there is none."""
    for callback in callbacks:
        if isinstance(callback, kind):
            return callback
    return None


def without(callbacks: Sequence[object], *excluded: object) -> list[object]:
    """Return the callbacks apart from some objects, which are told apart by identity."""
    excluded_ids = {id(callback) for callback in excluded}
    return [callback for callback in callbacks if id(callback) not in excluded_ids]


def _has(callback: object, hook: str) -> bool:
    return callable(getattr(callback, hook, None))


class Probe:
    """Prints the first weights after each microbatch, to see which of them changes the model."""

    def __init__(self, elements: int, say: Callable[[str], None] = print_line) -> None:
        self._elements = elements
        self._say = say

    def on_microbatch(self, trainer: Any, number: int, of: int) -> None:
        if trainer.plugin.rank == 0:
            first = local(next(trainer.model.unwrap().parameters()).detach()).flatten()
            values = " ".join(f"{x:+.6f}" for x in first[: self._elements].tolist())
            step = trainer.state.progress.step + 1
            self._say(f"step {step} microbatch {number}/{of}: {values}")


class EarlyStopping:
    """Ends the training after ``patience`` evaluations without an improvement."""

    def __init__(
        self,
        patience: int,
        metric: str = keys.EVAL_LOSS,
        min_delta: float = 0.0,
        direction: str | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, not {patience}")
        self.patience = patience
        self.metric = metric
        self.min_delta = min_delta
        self._higher = direction == "maximize" if direction else higher_is_better(metric)
        self.best = math.nan
        self.best_step = 0
        self.waited = 0

    def on_start(self, trainer: Any) -> None:
        self._end_if_due(trainer)  # a run that continues after it was to end

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            raise ValueError(f"there is no {self.metric}; evaluations have {or_list(metrics)}")
        value = metrics[self.metric]
        gain = value - self.best if self._higher else self.best - value
        better = math.isnan(self.best) or (gain > 0 and gain >= self.min_delta)
        if math.isfinite(value) and better:
            self.best = value
            self.best_step = trainer.state.progress.step
            self.waited = 0
        else:
            self.waited += 1
        self._end_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.waited = state["waited"]

    def _end_if_due(self, trainer: Any) -> None:
        if self.waited >= self.patience:
            more = f" by {self.min_delta:g}" if self.min_delta else ""
            evaluations = plural(self.waited, "evaluation")
            best = f"(best {self.best:.6g} at step {self.best_step})"
            trainer.end_early(f"{self.metric} did not improve{more} in {evaluations} {best}")


class _Step(NamedTuple):
    """What describes a step whose gradient may not be finite."""

    number: int
    epoch: int
    microbatches: range  # indices in the epoch
    scale: float | None
    norms: Norms | None


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
        steps: the first steps that were skipped otherwise, each with its number and its samples.

    Raises:
        ValueError: ``max_skips`` is less than 1.
    """

    def __init__(self, max_skips: int | None = 50) -> None:
        if max_skips is not None and max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, or None for never, not {max_skips}")
        self._max_skips = max_skips
        self.in_a_row = 0
        self.searches = 0
        self.steps: list[dict[str, Any]] = []
        self._reported: set[str] = set()  # "spike" and "gradient", once one was
        self._steps: dict[int, _Step] = {}
        self._flush = False
        self._failure: NonFiniteGradient | None = None

    def watch(self, booster: Booster, optimizer: OptimizerWrapper, windows: Windows) -> None:
        """Watch the steps of this training."""
        self._booster = booster
        self._optimizer = optimizer
        self._windows = windows

    def note(self, decision: Decision, before: Progress, window: Window) -> None:
        """Keep what describes a step, if its gradient is not finite or a device tells it later."""
        if transfer.can_read(decision.finite.device):
            if decision.finite:
                return
            self._flush = True
        step = self._step(before, window)
        self._steps[step.number] = step

    def described(
        self, error: NonFiniteGradient, before: Progress, window: Window, loss: float
    ) -> NonFiniteGradient:
        """Return an error that names the step, the samples and the ranks; a collective."""
        step = self._step(before, window)
        description = self._describe(step, loss, error.finding)
        message = f"step {step.number}: {description}"
        return NonFiniteGradient(message, error.advice, error.norm)

    def _step(self, before: Progress, window: Window) -> _Step:
        loss_scale = self._optimizer.loss_scale
        return _Step(
            number=before.step + 1,
            epoch=before.epoch,
            microbatches=range(window.first, window.first + len(window.batches)),
            scale=None if loss_scale is None else loss_scale.scale,
            norms=self._optimizer.norms,
        )

    def check(self, meter: Meter) -> None:
        if self._flush:
            self._flush = False
            meter.flush()
        if self._failure is not None:
            raise self._failure

    def follow(self, steps: Sequence[Row]) -> None:
        """Take the numbers of steps that have left the device; every rank calls this alike."""
        for numbers in steps:
            number = int(numbers[keys.TRAIN_STEP])
            norm = numbers[keys.GRAD_NORM]
            step = self._steps.pop(number, None)
            if numbers.get(keys.CLIP_SPIKE):
                self._keep(step)
                self._report_spike(number, numbers)
            elif step is None or math.isfinite(norm):
                self.in_a_row = 0
            elif self._searches(step, numbers[keys.LOCAL_LOSS]):
                self.searches += 1
            else:
                self._report_gradient(step, norm, numbers[keys.LOCAL_LOSS])

    def state_dict(self) -> dict[str, Any]:
        reported = sorted(self._reported)
        return {
            "in_a_row": self.in_a_row,
            "reported": reported,
            "searches": self.searches,
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row = state["in_a_row"]
        self.searches = state["searches"]
        self._reported = set(state["reported"])
        self.steps = list(state.get("steps", ()))  # earlier versions kept none

    def _keep(self, step: _Step | None) -> None:
        """Keep the samples of a step that was skipped, of all ranks, where they have indices."""
        if step is None or len(self.steps) == MOST_STEPS:
            return
        samples = self._samples(step, set(range(self._booster.plugin.data_size)))
        if samples is not None:
            self.steps.append({"step": step.number, "samples": [int(index) for index in samples]})

    def _searches(self, step: _Step, loss: float) -> bool:
        """Return whether a step only shows that the loss scale is too large."""
        if step.scale is None or step.scale <= 1.0:
            return False
        # All ranks have to agree. The loss of one that does not have it is zero.
        return self._booster.plugin.sum_over_data([float(not math.isfinite(loss))]) == [0.0]

    def _report_spike(self, number: int, numbers: Row) -> None:
        self.in_a_row += 1
        if self._is_due("spike", skipped=True):
            assert self._optimizer.skip is not None
            compared = self._optimizer.skip.compares
            names = " or ".join(_SPIKES[quantity].name for quantity in compared)
            values = [rounded(numbers[_SPIKES[quantity].key]) for quantity in compared]
            description = f"{names} is a spike: {' and '.join(values)}"
            self._report(number, numbers[keys.GRAD_NORM], description, skipped=True)

    def _report_gradient(self, step: _Step, norm: float, loss: float) -> None:
        """Report a gradient that is not finite; the step may have been taken all the same."""
        skipped = self._booster.nonfinite != "ignore" or step.scale is not None
        self.in_a_row += skipped
        if skipped:
            self._keep(step)
        if self._is_due("gradient", skipped):
            description = self._describe(step, loss, norm=norm)
            self._report(step.number, norm, description, skipped)

    def _is_due(self, kind: str, skipped: bool) -> bool:
        """Return True for the first report of a kind, and at the end of a long row."""
        is_first = kind not in self._reported
        self._reported.add(kind)
        return is_first or self._ends_run(skipped)

    def _ends_run(self, skipped: bool) -> bool:
        return skipped and self.in_a_row == self._max_skips

    def _report(self, number: int, norm: float, description: str, skipped: bool) -> None:
        """Warn of a step; fail at the end of a long row of skipped ones."""
        if self._ends_run(skipped):
            row = f"{self.in_a_row} steps in a row were skipped, up to step {number}"
            self._failure = NonFiniteGradient(f"{row}: {description}", self._advice(), norm)
        elif self._booster.plugin.rank == 0:
            event = "skipped" if skipped else "taken with a bad gradient"
            ends = ""
            if skipped and self._max_skips is not None:
                ends = f". {self._max_skips} skipped steps in a row (clip.max_skips) end the run"
            log.warning("step %d was %s: %s%s", number, event, description, ends)

    def _advice(self) -> str:
        rate = rounded(float(self._optimizer.param_groups[0]["lr"]))
        advice = f"try a lower learning rate (now {rate}), a longer warm-up of it"
        if self._booster.dtype in (torch.float16, torch.bfloat16):
            advice += ", or precision=fp32"
        return f"{advice}; clip.max_skips sets how many skipped steps end a run"

    def _describe(self, step: _Step, loss: float, description: str = "", norm: float = 0.0) -> str:
        """Describe the gradient of a step in one line, the same on every rank; a collective."""
        plugin = self._booster.plugin
        report = _Report(
            rank=plugin.rank,
            data_rank=plugin.data_rank,
            at_fault=not math.isfinite(loss),
            description=description or finding(self._optimizer.layout, step.norms, norm),
        )
        reports = [report] * plugin.world_size
        if plugin.world_size > 1:
            dist.all_gather_object(reports, report)
        text = reports[0].description
        # Ranks have combined their gradients: only the losses tell whose samples are at fault.
        at_fault = [report for report in reports if report.at_fault]
        if at_fault and len(reports) > 1:
            text += f", from {ranks_as_text([report.rank for report in at_fault])}"
        text += ". A loss is not finite" if at_fault else ". All losses are finite"
        samples = self._samples(step, {report.data_rank for report in at_fault or reports})
        if samples is None:
            return f"{text}. Only loaders of plugin.prepare_dataloader tell the step's samples"
        if plugin.rank == 0:
            log.info("samples of step %d: %s", step.number, ", ".join(samples))
        return f"{text}. Its samples: {first_few(samples, MOST_SAMPLES)}"

    def _samples(self, step: _Step, data_ranks: set[int]) -> list[str] | None:
        """Return the indices of the samples of data-parallel ranks; None if nothing tells them."""
        samples: list[str] = []
        for number in step.microbatches:
            indices_of_ranks = self._windows.indices(step.epoch, number)
            if indices_of_ranks is None:
                return None
            for data_rank in sorted(data_ranks):
                samples += [str(index) for index in indices_of_ranks[data_rank]]
        return samples


class _Quantity(NamedTuple):
    """What a skip rule compares, as a message names it, and the key of its value in a row."""

    name: str
    key: str


_SPIKES = {
    "norm": _Quantity("the norm of the gradient", keys.GRAD_NORM),
    "loss": _Quantity("the loss", keys.TRAIN_LOSS),
    "update": _Quantity("the norm of the update", keys.UPDATE_NORM),
}


class _Report(NamedTuple):
    """What a rank says of a step whose gradient is not finite."""

    rank: int
    data_rank: int
    at_fault: bool
    description: str
