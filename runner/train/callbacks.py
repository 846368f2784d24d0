"""Objects of the user that a training calls after steps, after evaluations and at its end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from runner.booster import Plugin
from runner.telemetry.step import StepMetrics

if TYPE_CHECKING:
    from runner.train.trainer import Trainer

log = logging.getLogger(__name__)

HOOKS = ("on_start", "on_step", "on_evaluate", "on_end")
"""Methods that are called; an object has some of them."""


class CallbackError(RuntimeError):
    """A callback raised an exception; the message names the callback and its method."""


class Callback:
    """What a callback may do. Any object with some of these methods is one."""

    def on_start(self, trainer: Trainer) -> None:
        """Run before the first step, and before the first one of a run that continues."""

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Run after an optimizer step."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation, whose metrics are the same on every rank."""

    def on_end(self, trainer: Trainer, summary: Mapping[str, Any]) -> None:
        """Run after the last step, when the final weights are saved; not if the training fails."""


class Callbacks:
    """Calls callbacks one after the other, and agrees with the other ranks whether to end."""

    def __init__(self, callbacks: Sequence[object], plugin: Plugin) -> None:
        self._plugin = plugin
        self._asked: str | None = None
        self.ended: str | None = None
        self._named: dict[str, object] = {}
        times: Counter[str] = Counter()
        for each in callbacks:
            name = f"{type(each).__module__}.{type(each).__qualname__}"
            if not any(callable(getattr(each, hook, None)) for hook in HOOKS):
                hooks = ", ".join(HOOKS)
                raise TypeError(f"{name} is no callback: it has none of the methods {hooks}")
            times[name] += 1
            self._named[name if times[name] == 1 else f"{name}#{times[name]}"] = each

    def ask(self, reason: str) -> None:
        """Ask for the end of the training, on this rank."""
        self._asked = self._asked or reason

    def start(self, trainer: Trainer) -> None:
        """Call ``on_start``."""
        self._call("on_start", trainer)

    def step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Call ``on_step``."""
        self._call("on_step", trainer, metrics)

    def evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Call ``on_evaluate``."""
        self._call("on_evaluate", trainer, dict(metrics))

    def end(self, trainer: Trainer, summary: Mapping[str, Any]) -> None:
        """Call ``on_end``."""
        self._call("on_end", trainer, summary)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback that has one, by its class."""
        return {
            name: each.state_dict()
            for name, each in self._named.items()
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the states of the callbacks that this run has too."""
        for name, each in self._named.items():
            if name in states and hasattr(each, "load_state_dict"):
                each.load_state_dict(states[name])

    def _call(self, hook: str, *args: Any) -> None:
        called = False
        for name, each in self._named.items():
            method: Callable[..., object] | None = getattr(each, hook, None)
            if method is None or getattr(type(each), hook, None) is getattr(Callback, hook):
                continue
            called = True
            try:
                method(*args)
            except Exception as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise CallbackError(f"callback {name} failed in {hook}: {why}") from error
        if called and self.ended is None:
            self._agree()

    def _agree(self) -> None:
        """End if some rank asked for it, for the reason of the first one that did."""
        ranks = self._plugin.world_size
        if ranks > 1 and any(self._plugin.sum_over_ranks([float(self._asked is not None)])):
            reasons: list[str | None] = [None] * ranks
            dist.all_gather_object(reasons, self._asked)
            self._asked = next(reason for reason in reasons if reason is not None)
        self.ended = self._asked
        if self.ended is not None and self._plugin.rank == 0:
            log.info("the training ends early: %s", self.ended)
