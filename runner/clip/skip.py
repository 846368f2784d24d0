"""Skip an optimizer step whose gradient norm is a spike, without the host's waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.transfer import Number
from runner.config.clip_section import WINDOW, Skip
from runner.config.section import read


class Past(NamedTuple):
    """What a rule remembers, as tensors on one device, which are replaced and never written to.

    ``kept`` are of ``sigma`` the norms of the last kept steps [window], the newest last, NaN where
    there is none; of ``ema`` their moving average from an average of 0 [1].
    """

    kept: Tensor
    steps: Tensor  # number of kept steps [1], of sigma at most the window
    missed: Tensor  # those of the last steps, skipped in a row [accept_after]; else NaN

    def or_if(self, condition: Tensor, other: Past) -> Past:
        """Return ``other`` where the condition holds, else this."""
        return Past(*(torch.where(condition, b, a) for a, b in zip(self, other, strict=True)))


class SkipRule:
    """Decides which steps are skipped as spikes; its options are those of section ``clip.skip``.

    History holds the norms of kept steps alone. A step whose gradient is not finite is no spike,
    and neither enters the history nor ends a row of skips.

    ``sigma`` limits a norm to the mean of kept ones plus k standard deviations (with Bessel's
    correction, as in OLMo-core), ``ema`` to k times their moving average, corrected for its start
    at 0 as Adam's moments are.

    Example:
        >>> rule = SkipRule("sigma", k=4.0)
        >>> decision = apply_gradient_clipping(model, "norm", 1.0)
        >>> if not rule.is_spike(decision.norm):
        ...     optimizer.step()
    """

    def __init__(self, rule: Literal["sigma", "ema"] = "sigma", **options: Any) -> None:
        if rule is None:
            raise ValueError("rule must be sigma or ema")
        chosen: Skip = read(Skip, {"rule": rule, **options})
        self.rule, self.accept_after = rule, chosen.accept_after
        self.window, self.decay = chosen.window or WINDOW, chosen.decay or 0.99
        usual, least = 6.0, max(2, self.window // 2)
        if rule == "ema":
            self.window, usual, least = 1, 20.0, max(1, round(1 / (1 - self.decay)))
        self.k, self.min_steps = chosen.k or usual, chosen.min_steps or least
        self._past = self._empty(torch.empty(0))

    @torch.no_grad()
    def is_spike(self, norm: Number) -> bool | Tensor:
        """Decide whether a step is skipped, given its norm before clipping, and note the norm.

        The host does not wait for an accelerator. Ranks that give the same bits decide alike. The
        result is a bool for a float, else a 0-dimensional boolean tensor.
        """
        device = norm.device if isinstance(norm, Tensor) else torch.device("cpu")
        value = transfer.on_device([norm], device)
        past, finite = Past(*(each.to(value) for each in self._past)), value.isfinite()
        spike = finite & (past.steps >= self.min_steps) & (value > self._limit(past))
        past = past.or_if(finite & ~spike, self._longer(past, value))
        if self.accept_after is not None:
            missed = torch.cat([past.missed[1:], value])
            past = past.or_if(spike, past._replace(missed=missed))
            # So many skips in a row are the new level, whose history is theirs.
            anew = self._longer(self._empty(value), past.missed)
            past = past.or_if(past.missed[:1].isfinite(), anew)
        self._past = past
        return spike[0] if isinstance(norm, Tensor) else bool(spike)

    def state_dict(self) -> dict[str, Any]:
        """Return the history; an accelerator is waited for."""
        history = {name: value.cpu() for name, value in self._past._asdict().items()}
        return {"rule": self.rule, "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; anew after another rule or window."""
        self._past = empty = self._empty(torch.empty(0))
        loaded = Past(*(state["history"][name] for name in Past._fields))
        if state["rule"] == self.rule and len(loaded.kept) == len(empty.kept):
            missed = torch.cat([empty.missed, loaded.missed])[len(loaded.missed) :]
            missed[:1] = math.nan  # the next skip may be the one that is accepted
            self._past = loaded._replace(missed=missed)

    def _empty(self, like: Tensor) -> Past:
        kept = like.new_full((self.window,), math.nan if self.rule == "sigma" else 0.0)
        return Past(kept, like.new_zeros(1), like.new_full((self.accept_after or 0,), math.nan))

    def _limit(self, past: Past) -> Tensor:
        """Return the largest norm that is no spike, [1]."""
        if self.rule == "ema":
            mean = past.kept / (1.0 - torch.pow(self.decay, past.steps))
            return torch.where(mean > 0, mean * self.k, torch.inf)
        # From the newest norm, so that the mean of equal norms is exact.
        newest = past.kept[-1:]
        away = past.kept - newest
        mean = away.nansum() / past.steps
        squares = (away - mean).square().nansum()
        return newest + mean + self.k * (squares / (past.steps - 1.0)).sqrt()

    def _longer(self, past: Past, norms: Tensor) -> Past:
        """Return the history with further kept steps, [steps], which end a row of skips."""
        kept, count = past.kept, past.steps + float(len(norms))
        if self.rule == "sigma":
            kept = torch.cat([kept, norms])[-self.window :].clone()
            count = count.clamp(max=self.window)
        else:
            age = torch.arange(len(norms), 0, -1, device=kept.device, dtype=kept.dtype) - 1.0
            new = (norms * ((1.0 - self.decay) * torch.pow(self.decay, age))).sum()
            kept = self.decay ** len(norms) * kept + new
        return Past(kept, count, torch.full_like(past.missed, math.nan))
