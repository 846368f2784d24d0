"""Skip an optimizer step whose gradient norm, or loss, is a spike, without the host's waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.config.clip_section import WINDOW, Skip, SkipRuleName
from runner.config.section import read
from runner.gradients import transfer


class Past(NamedTuple):
    """What a rule remembers, as tensors on one device, which are replaced and never written to.

    A row of ``kept`` and of ``missed`` is of one quantity, such as the norm. With rule
    ``sigma``, ``kept`` holds the values of the last kept steps [quantities, window], the newest
    last, and NaN where there is none. With ``ema`` it holds their moving average, which begins at 0
    [quantities, 1].
    """

    kept: Tensor
    steps: Tensor  # number of kept steps [1], with sigma at most the window
    missed: Tensor  # of the last steps, if skipped in a row [quantities, accept_after]; else NaN

    def or_if(self, condition: Tensor, past: Past) -> Past:
        """Return ``past`` where the condition holds, else this."""
        return Past(
            kept=torch.where(condition, past.kept, self.kept),
            steps=torch.where(condition, past.steps, self.steps),
            missed=torch.where(condition, past.missed, self.missed),
        )

    def to(self, like: Tensor) -> Past:
        """Return this with the device and type of ``like``."""
        return Past(self.kept.to(like), self.steps.to(like), self.missed.to(like))


class SkipRule:
    """Decides which steps are skipped as spikes; section ``clip.skip`` has the same options.

    ``of`` says what is compared: the ``norm`` of the gradient, the ``loss``, the norm of the
    ``update`` that would be taken, or ``any`` of norm and loss. The history holds the values of
    kept steps only. A step with a value that is not finite is no spike: it does not enter the
    history, and does not end a row of skips.

    ``sigma`` limits a value to the mean of kept ones plus k standard deviations (with Bessel's
    correction, as in OLMo-core), ``ema`` to k times their moving average, corrected for its start
    at 0 as Adam's moments are, and ``constant`` to k itself.

    Attributes:
        compares: the quantities that :meth:`is_spike` takes, in this order.

    Example:
        >>> rule = SkipRule("sigma", k=4.0)
        >>> decision = apply_gradient_clipping(model, "norm", 1.0)
        >>> if not rule.is_spike(decision.norm):
        ...     optimizer.step()
    """

    def __init__(self, rule: SkipRuleName = "sigma", **options: Any) -> None:
        if rule is None:
            raise ValueError("rule must be sigma, ema or constant")
        chosen: Skip = read(Skip, {"rule": rule, **options})
        self.rule = rule
        self.of = chosen.of
        self.compares: tuple[str, ...] = ("norm", "loss") if chosen.of == "any" else (chosen.of,)
        self.accept_after = None if rule == "constant" else chosen.accept_after
        self.decay = chosen.decay or 0.99
        if rule == "constant":
            assert chosen.k is not None
            self.window = 1
            self.k = chosen.k
            self.min_steps = 0
        elif rule == "sigma":
            self.window = chosen.window or WINDOW
            self.k = chosen.k or 6.0
            self.min_steps = chosen.min_steps or max(2, self.window // 2)
        else:
            self.window = 1
            self.k = chosen.k or 20.0
            self.min_steps = chosen.min_steps or max(1, round(1 / (1 - self.decay)))
        self._past = self._empty(torch.empty(0))

    @torch.no_grad()
    def is_spike(self, *values: Tensor | float) -> Tensor:
        """Decide whether a step is skipped, given what ``compares`` names, and note these values.

        The norm is the one before clipping. The host does not wait for an accelerator. Ranks that
        give the same bits decide alike. The result is a 0-dimensional boolean tensor.
        """
        if len(values) != len(self.compares):
            raise TypeError(f"is_spike takes {' and '.join(self.compares)}: {len(values)} given")
        tensors = [value for value in values if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        numbers = [
            value.detach().to(device, transfer.widest(device))
            if isinstance(value, Tensor)
            else transfer.number(value, device)
            for value in values
        ]
        value = torch.stack(numbers).view(-1, 1)
        past = self._past.to(value)
        finite = value.isfinite().all()
        above = (value > self._limit(past)).any()
        spike = finite & above & (past.steps >= self.min_steps)
        past = past.or_if(finite & ~spike, self._longer(past, value))
        if self.accept_after is not None:
            missed = torch.cat([past.missed[:, 1:], value], 1)
            past = past.or_if(spike, past._replace(missed=missed))
            # After this many skips in a row their values are the new level, and the new history.
            new_level = self._longer(self._empty(value), past.missed)
            past = past.or_if(past.missed[0, :1].isfinite(), new_level)
        self._past = past
        return spike[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the history; an accelerator is waited for."""
        history = {name: value.cpu() for name, value in self._past._asdict().items()}
        return {"rule": self.rule, "of": self.of, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; anew after another rule or window."""
        empty = self._empty(torch.empty(0))
        self._past = empty
        loaded = Past(*(state["history"][name] for name in Past._fields))
        if loaded.kept.ndim == 1:  # of an earlier version, which compared the norm alone
            loaded = Past(loaded.kept[None], loaded.steps, loaded.missed[None])
        same_rule = (state["rule"], state.get("of", "norm")) == (self.rule, self.of)
        if same_rule and loaded.kept.shape == empty.kept.shape:
            older = loaded.missed.shape[1]
            missed = torch.cat([empty.missed, loaded.missed], 1)[:, older:]
            missed[:, :1] = math.nan  # the next skip may be the one that is accepted
            self._past = loaded._replace(missed=missed)

    def _empty(self, like: Tensor) -> Past:
        rows = len(self.compares)
        kept = like.new_full((rows, self.window), math.nan if self.rule == "sigma" else 0.0)
        missed = like.new_full((rows, self.accept_after or 0), math.nan)
        return Past(kept, like.new_zeros(1), missed)

    def _limit(self, past: Past) -> Tensor:
        """Return the largest values that are no spike, [quantities, 1]."""
        if self.rule == "constant":
            return torch.full_like(past.kept, self.k)
        if self.rule == "ema":
            mean = past.kept / (1.0 - torch.pow(self.decay, past.steps))
            return torch.where(mean > 0, mean * self.k, torch.inf)
        # From the newest value, so that the mean of equal ones is exact.
        newest = past.kept[:, -1:]
        away = past.kept - newest
        mean = away.nansum(1, keepdim=True) / past.steps
        squares = (away - mean).square().nansum(1, keepdim=True)
        return newest + mean + self.k * (squares / (past.steps - 1.0)).sqrt()

    def _longer(self, past: Past, values: Tensor) -> Past:
        """Return the history with further kept steps, [quantities, steps], which end skips."""
        kept = past.kept
        further = values.shape[1]
        count = past.steps + float(further)
        if self.rule == "sigma":
            kept = torch.cat([kept, values], 1)[:, -self.window :].clone()
            count = count.clamp(max=self.window)
        else:
            age = torch.arange(further, 0, -1, device=kept.device, dtype=kept.dtype) - 1.0
            weights = (1.0 - self.decay) * torch.pow(self.decay, age)
            new = (values * weights).sum(1, keepdim=True)
            kept = self.decay**further * kept + new
        return Past(kept, count, torch.full_like(past.missed, math.nan))
