"""Objects that a training calls: the user's own, early stopping, and the probe of the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from runner.booster import ModelWrapper, Plugin
from runner.clip.shard import local
from runner.config.notation import higher_is_better, plural
from runner.config.problem import or_list
from runner.run_folder import keys
from runner.telemetry.meter import StepMetrics

log = logging.getLogger(__name__)


class Training(Protocol):
    """What callbacks are given: the :class:`runner.Trainer`, which has more than this."""

    model: ModelWrapper
    plugin: Plugin
    state: Any

    def end_early(self, reason: str) -> None: ...


class CallbackError(RuntimeError):
    """A callback raised an exception; the message names the callback and its method."""


class Callback:
    """What a callback may do. Any object with some of these methods is one.

    One with ``state_dict`` and ``load_state_dict`` is saved in checkpoints and continued.
    """

    def on_start(self, trainer: Training) -> None:
        """Run before the first step, and before the first one of a run that continues."""

    def on_microbatch(self, trainer: Training, number: int, of: int) -> None:
        """Run after microbatch ``number`` (from 1) of a step; after the step for the last one."""

    def on_step(self, trainer: Training, metrics: StepMetrics) -> None:
        """Run after an optimizer step."""

    def on_evaluate(self, trainer: Training, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation, whose metrics are the same on every rank."""

    def on_end(self, trainer: Training, summary: Mapping[str, Any]) -> None:
        """Run after the last step, when the final weights are saved; not if the training fails."""


HOOKS = ("on_start", "on_microbatch", "on_step", "on_evaluate", "on_end")


class Callbacks:
    """Calls callbacks one after the other, and agrees with the other ranks whether to end.

    ``ended`` is why the training ends early, the same on all ranks.
    """

    def __init__(self, callbacks: Sequence[object], plugin: Plugin) -> None:
        self._plugin = plugin
        self._asked: str | None = None
        self.ended: str | None = None
        self._named: dict[str, object] = {}
        self._hooks: dict[str, dict[str, Callable[..., object]]] = {hook: {} for hook in HOOKS}
        for each in callbacks:
            name = kind = f"{type(each).__module__}.{type(each).__qualname__}"
            while name in self._named:
                name += "#"
            self._named[name] = each
            found = {hook: getattr(each, hook, None) for hook in HOOKS}
            if not any(map(callable, found.values())):
                hooks = ", ".join(HOOKS)
                raise TypeError(f"{kind} is no callback: it has none of the methods {hooks}")
            for hook, method in found.items():
                inherited = getattr(type(each), hook, None) is getattr(Callback, hook)
                if method is not None and not inherited:
                    self._hooks[hook][name] = method

    def ask(self, reason: str) -> None:
        self._asked = self._asked or reason

    def call(self, hook: str, *args: Any) -> None:
        for name, method in self._hooks[hook].items():
            try:
                method(*args)
            except Exception as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise CallbackError(f"callback {name} failed in {hook}: {why}") from error
        # Microbatches are no place to end, and too many for a collective each.
        if self._hooks[hook] and hook != "on_microbatch" and self.ended is None:
            self._agree()

    def _agree(self) -> None:
        ranks = self._plugin.world_size
        if ranks > 1 and any(self._plugin.sum_over_ranks([float(self._asked is not None)])):
            reasons: list[str | None] = [None] * ranks
            dist.all_gather_object(reasons, self._asked)
            self._asked = next(reason for reason in reasons if reason is not None)
        self.ended = self._asked
        if self.ended is not None and self._plugin.rank == 0:
            log.info("the training ends early: %s", self.ended)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: each.state_dict()
            for name, each in self._named.items()
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, each in self._named.items():
            if name in states and hasattr(each, "load_state_dict"):
                each.load_state_dict(states[name])


class Probe(Callback):
    """Prints the first weights after each microbatch, to see which of them changes the model."""

    def __init__(self, elements: int, say: Callable[[str], None] = print) -> None:
        self._elements, self._say = elements, say

    def on_microbatch(self, trainer: Training, number: int, of: int) -> None:
        if trainer.plugin.rank == 0:
            first = local(next(trainer.model.unwrap().parameters()).detach()).flatten()
            values = " ".join(f"{x:+.6f}" for x in first[: self._elements].tolist())
            step = trainer.state.progress.step + 1
            self._say(f"step {step} microbatch {number}/{of}: {values}")


class EarlyStopping(Callback):
    """Ends the training after ``patience`` evaluations in a row without an improvement.

    Args:
        patience: number of evaluations.
        metric: metric of evaluations that should improve.
        min_delta: smallest improvement that counts.
        direction: ``minimize`` or ``maximize``; by default that of the metric's name.
    """

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

    def on_start(self, trainer: Training) -> None:
        self._end_if_due(trainer)  # a run that continues after it was to end

    def on_evaluate(self, trainer: Training, metrics: Mapping[str, float]) -> None:
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

    def _end_if_due(self, trainer: Training) -> None:
        if self.waited >= self.patience:
            more = f" by {self.min_delta:g}" if self.min_delta else ""
            trainer.end_early(
                f"{self.metric} did not improve{more} in {plural(self.waited, 'evaluation')} "
                f"(best {self.best:.6g} at step {self.best_step})"
            )
