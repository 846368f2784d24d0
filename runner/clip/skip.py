"""Skip an optimizer step whose loss or gradient norm is a spike.

The decision is a tensor function of the values of the step, so that an accelerator makes it without
the host: the boosted optimizer puts it into the flag that fused optimizers read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.transfer import Number
from runner.config.skip import SkipOptions


@dataclass(eq=False)
class SkipRule(SkipOptions):
    """Decides which steps are skipped as spikes; see :class:`runner.config.skip.SkipOptions`.

    History holds the values of kept steps alone. A step whose gradient is not finite is no spike:
    it is left to ``nonfinite``, and neither enters the history nor ends a row of skips. A loss that
    is not finite although the gradient is counts as a spike once the rule acts, and never as a new
    level.

    Where the average of ``ema`` is not above 0 (a negative loss), no multiple of it is a limit, and
    nothing is skipped.

    Example:
        >>> rule = SkipRule("sigma", k=4.0)
        >>> decision = apply_gradient_clipping(model, "norm", 1.0)
        >>> if not rule.is_spike(decision.norm):
        ...     optimizer.step()
    """

    _history: _History | None = field(default=None, init=False, repr=False)
    _loaded: Mapping[str, Any] | None = field(default=None, init=False, repr=False)

    @property
    def reads_loss(self) -> bool:
        """Whether the rule needs the loss of a step."""
        return self.of != "norm"

    @torch.no_grad()
    def is_spike(
        self, norm: Number, loss: Number | None = None, finite: bool | Tensor | None = None
    ) -> bool | Tensor:
        """Decide whether a step is skipped, and note its values.

        The host does not wait for an accelerator. Ranks that give the same bits decide alike.

        Args:
            norm: norm of the gradient before clipping.
            loss: loss of the step, for a rule that reads it.
            finite: whether the gradient is finite; by default, whether ``norm`` is.

        Returns:
            A bool where ``norm`` is a float, else a 0-dimensional boolean tensor.

        Raises:
            ValueError: the rule reads the loss, and none is given.
        """
        if self.reads_loss and loss is None:
            raise ValueError(f"a skip rule of {self.of} reads the loss of each step: give it")
        device = norm.device if isinstance(norm, Tensor) else torch.device("cpu")
        vector = transfer.on_device([norm] if loss is None else [norm, loss], device)
        if finite is None:
            finite = vector[0].isfinite()
        values = {"norm": vector[:1], "loss": vector[1:], "either": vector}[self.of]
        if self._history is None:
            self._history = self._begin(values)
        spike = self._history.step(values, finite)
        return spike if isinstance(norm, Tensor) else bool(spike)

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for a rule of the same kind; an accelerator is waited for."""
        kept = self._loaded if self._history is None else self._history.state_dict()
        return {"rule": self.rule, "of": self.of, "history": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; anew after another ``rule`` or ``of``."""
        self._history = None
        same = (state["rule"], state["of"]) == (self.rule, self.of)
        self._loaded = state["history"] if same else None

    def _begin(self, values: Tensor) -> _History:
        """Return the history before a first step with ``values``."""
        assert self.k is not None
        assert self.min_steps is not None
        common = (self.k, self.min_steps, self.accept_after, values)
        made = (
            _Window(*common, self.window)
            if self.window is not None
            else _Average(*common, self.decay or 0.0)
        )
        if self._loaded is not None:
            made.load_state_dict(self._loaded)
        return made


class _History(ABC):
    """What a rule remembers, as tensors on one device, which are replaced and never written to.

    Attributes:
        kept: what is known of kept steps.
        count: number of them.
        missed: values of the last skipped steps [values, accept_after], the newest last.
        streak: number of skips in a row that are in ``missed``.
    """

    kept: Tensor

    def __init__(self, k: float, min_steps: int, accept_after: int | None, values: Tensor) -> None:
        self._k, self._min_steps, self._accept_after = k, min_steps, accept_after
        self.count = self.streak = values.new_zeros(())
        self.missed = values.new_zeros(len(values), accept_after or 0)

    @abstractmethod
    def limits(self) -> Tensor:
        """Return the largest value [values] that is no spike."""

    @abstractmethod
    def longer(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``kept`` and ``count`` with a further step."""

    @abstractmethod
    def anew(self) -> tuple[Tensor, Tensor]:
        """Return ``kept`` and ``count`` after the skipped steps were accepted."""

    def step(self, values: Tensor, finite: bool | Tensor) -> Tensor:
        """Return whether ``values`` [values] are a spike, and note them."""
        above = ~(values <= self.limits())  # also where a value is NaN
        spike = (self.count >= self._min_steps) & above.any() & finite
        usable = values.isfinite().all() & finite
        keep, miss = usable & ~spike, usable & spike
        # Where the host can read, it leaves out what would change nothing.
        known = transfer.can_read(values.device)
        if not known or keep:
            self._replace(keep, self.longer(values))
        if self._accept_after is not None and (not known or miss):
            self.missed = torch.where(miss, _shifted(self.missed, values), self.missed)
            self.streak = self.streak + miss
            self._replace(self.streak >= self._accept_after, self.anew())
        return spike

    def _replace(self, where: Tensor, history: tuple[Tensor, Tensor]) -> None:
        """Replace the history, and end the row of skips, where ``where`` holds."""
        self.kept = torch.where(where, history[0], self.kept)
        self.count = torch.where(where, history[1], self.count)
        self.streak = torch.where(where, 0.0, self.streak)

    def state_dict(self) -> dict[str, Any]:
        """Return the history on the host."""
        return {
            "kept": self.kept.cpu().clone(),
            "count": int(self.count),
            "missed": _last(self.missed, int(self.streak)).cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same kind, whose options may have been others."""
        self.kept = state["kept"].to(self.kept)
        self.count = torch.full_like(self.count, state["count"])
        self.missed = _filled(self.missed, state["missed"])
        room = max(0, self.missed.shape[1] - 1)  # The next skip may be the one that is accepted.
        self.streak = torch.full_like(self.streak, min(state["missed"].shape[1], room))


class _Window(_History):
    """The values of the last kept steps [values, size], the newest last; NaN where there is none.

    A limit is their mean plus k standard deviations (with Bessel's correction, as in OLMo-core).
    """

    def __init__(
        self, k: float, min_steps: int, accept_after: int | None, values: Tensor, size: int
    ) -> None:
        super().__init__(k, min_steps, accept_after, values)
        self.kept = values.new_full((len(values), size), math.nan)

    def limits(self) -> Tensor:
        # From the newest value, so that the mean of equal values is exact.
        newest = self.kept[:, -1:]
        away = self.kept - newest
        mean = away.nansum(1, keepdim=True) / self.count
        squares = (away - mean).square().nansum(1, keepdim=True)
        return (newest + mean + self._k * (squares / (self.count - 1.0)).sqrt())[:, 0]

    def longer(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return _shifted(self.kept, values), (self.count + 1.0).clamp(max=self.kept.shape[1])

    def anew(self) -> tuple[Tensor, Tensor]:
        size, m = self.kept.shape[1], self.missed.shape[1]
        before = torch.full_like(self.kept, math.nan)
        return _last(torch.cat([before, self.missed], 1), size), self.count.new_full(
            (), min(m, size)
        )

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"kept": _last(state["kept"], state["count"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = _filled(self.kept, state["kept"])
        super().load_state_dict(
            {**state, "kept": kept, "count": min(state["count"], kept.shape[1])}
        )


class _Average(_History):
    """The exponential moving average of kept steps [values], from an average of 0.

    A limit is k times the average, corrected for the weight of that 0 as Adam's moments are.
    """

    def __init__(
        self, k: float, min_steps: int, accept_after: int | None, values: Tensor, decay: float
    ) -> None:
        super().__init__(k, min_steps, accept_after, values)
        self.kept = torch.zeros_like(values)
        self._decay = decay

    def limits(self) -> Tensor:
        mean = self.kept / (1.0 - torch.pow(self._decay, self.count))
        return torch.where(mean > 0, mean * self._k, torch.inf)

    def longer(self, values: Tensor) -> tuple[Tensor, Tensor]:
        mean = self._decay * self.kept + (1.0 - self._decay) * values
        return mean, self.count + 1.0

    def anew(self) -> tuple[Tensor, Tensor]:
        m = self.missed.shape[1]
        age = torch.arange(m, 0, -1, device=self.kept.device, dtype=self.kept.dtype) - 1.0
        weights = (1.0 - self._decay) * torch.pow(self._decay, age)
        return (self.missed * weights).sum(1), self.count.new_full((), m)


def _shifted(rows: Tensor, newest: Tensor) -> Tensor:
    """Return rows without their oldest value, and with another newest one."""
    return torch.cat([rows[:, 1:], newest[:, None]], 1)


def _last(rows: Tensor, count: int) -> Tensor:
    """Return a copy of the last ``count`` values of each row."""
    return rows[:, rows.shape[1] - count :].clone()


def _filled(rows: Tensor, values: Tensor) -> Tensor:
    """Return rows that end with ``values``, as many as there is room for."""
    return _last(torch.cat([rows, values.to(rows)], 1), rows.shape[1])
