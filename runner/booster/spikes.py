"""Apply a skip rule to the steps of an optimizer: collect the loss of a step, and decide."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from runner.booster.step_order import StepOrderError
from runner.clip import Number, transfer
from runner.clip.shard import is_dtensor
from runner.clip.skip import SkipRule


def at_once(loss: Number) -> Callable[[], Number]:
    """Return the loss of the one rank that there is."""
    return lambda: loss


class Spikes:
    """The loss of the current step, and whether a rule leaves the step out.

    Attributes:
        found: whether the current step is a spike; False while it is not decided.
    """

    def __init__(
        self, rule: SkipRule | None, start_mean: Callable[[Number], Callable[[], Number]]
    ) -> None:
        self.rule = rule
        self.found: bool | Tensor = False
        self._start_mean = start_mean
        self._loss: Number | None = None  # up to now; None while unknown

    def begin_step(self) -> None:
        """Begin the next step."""
        self.found, self._loss = False, None

    def add(self, loss: Tensor, weight: float) -> None:
        """Add ``loss * weight`` to the loss of the step on this rank."""
        if self.rule is None or not self.rule.reads_loss:
            return
        loss = loss.detach()
        whole = loss.full_tensor() if is_dtensor(loss) else loss
        wide = whole.reshape(()).to(transfer.widest(whole.device))
        added = transfer.read(wide) * weight
        self._loss = added if self._loss is None else self._loss + added

    def start_loss(self) -> Callable[[], Number | None]:
        """Start to exchange the loss of the step, so that it travels while the norm is measured."""
        if self.rule is None or not self.rule.reads_loss:
            return lambda: None
        if self._loss is None:
            raise StepOrderError(
                f"the skip rule reads the loss (of={self.rule.of}): call booster.backward(loss, "
                "optimizer) instead of loss.backward()"
            )
        return self._start_mean(self._loss)

    def decide(
        self, norm: Number, loss: Number | None, finite: bool | Tensor, known: bool
    ) -> Number:
        """Decide whether the step is a spike."""
        assert self.rule is not None
        spike = self.rule.is_spike(norm, loss, finite)
        self.found = bool(spike) if known else spike
        return spike.to(transfer.widest(spike.device)) if isinstance(spike, Tensor) else spike + 0.0

    def left_out(self, finite: bool | Tensor) -> bool | Tensor:
        """Return whether to take the step: where ``finite`` holds, unless it is a spike."""
        if self.found is False or finite is False:
            return finite
        return ~self.found & finite if isinstance(self.found, Tensor) else False
