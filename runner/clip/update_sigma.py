"""Rule ``sigma`` of mode ``update``: the norm of the whole update, compared with earlier ones.

Levanter's ``clip_update_norm``: the update, weight decay included and before it is multiplied by
the learning rate, is scaled down to a norm of at most the mean of the last 128 such norms plus k
times their standard deviation (that of a population, at least 1e-6), from 64 norms on. Norms enter
the history before they are limited. Levanter also keeps norms that are not finite, after which it
compares with NaN for 128 steps; here these steps are not taken, so they do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision
from runner.clip.layout import Layout
from runner.clip.norms import combine, power_sum
from runner.clip.second_moment import Stepped
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number

SMALLEST = 1e-6
"""Lower bound of a standard deviation, as published."""


class PastUpdates:
    """Limits updates by those of earlier steps."""

    def __init__(self, history: dict[str, Number], factor: float) -> None:
        self._history = history
        self._factor = factor

    @staticmethod
    def initial(window: int) -> dict[str, Number]:
        """Return a history of no updates."""
        return {"norms": torch.zeros(window, dtype=torch.float64), "count": 0.0}

    def limit_update(
        self,
        layout: Layout,
        decision: Decision,
        kept: Sequence[tuple[ParamShard, Tensor, Number]],
        stepped: Stepped,
    ) -> Decision:
        """Measure the update that was taken, limit it, and remember its norm; one collective."""
        weights, backwards = [s.weight for s, *_ in kept], [before for _, before, _ in kept]
        if kept:
            torch._foreach_sub_(backwards, weights)
        power = self._power([shard for shard, *_ in kept], backwards, stepped, layout)
        norm = combine([power] if layout.group is None else layout.gather([power])[0], 2.0)
        limit = self._limit(layout.device)
        if isinstance(norm, Tensor):
            return self._on_device(norm, limit, weights, backwards, decision)
        bound = float(limit)
        done = replace(decision, max_stat=norm, threshold=bound, update=None)
        if norm > bound:
            torch._foreach_add_(weights, backwards, alpha=1.0 - bound / norm)
            done = replace(done, coef=bound / norm, clipped=1.0, fraction=1.0)
        if 0.0 < norm < math.inf:
            self._remember(torch.tensor(norm, dtype=torch.float64), torch.tensor(True))
        return done

    def _power(
        self,
        shards: Sequence[ParamShard],
        updates: Sequence[Tensor],
        stepped: Stepped,
        layout: Layout,
    ) -> Number:
        """Return this rank's share of the squared norm of the update ÷ learning rate."""
        total: Number = 0.0
        for shard, update in zip(shards, updates, strict=True):
            rate = stepped.group(shard).get("lr", 1.0)
            scale = stepped.copies[shard.name]
            if transfer.can_read(layout.device):
                rate = float(rate)
                total += power_sum([update]) / (rate * rate * scale) if rate else 0.0
                continue
            wide = transfer.widest(update.device)
            square = torch.linalg.vector_norm(update, dtype=wide).square()
            square = square / (rate * rate * scale) if isinstance(rate, Tensor) or rate else 0.0
            total = total + square
        return total

    def _limit(self, device: torch.device) -> Tensor:
        """Return mean + k·σ of the history; NaN while it holds too few norms."""
        norms, count = self._now(device)
        window = len(norms)
        mask = torch.arange(window, device=device) >= window - count
        mean = norms.where(mask, 0.0).sum() / count.clamp(min=1.0)
        spread = (norms - mean).where(mask, 0.0).square().sum() / count.clamp(min=1.0)
        limit = mean + self._factor * spread.sqrt().clamp(min=SMALLEST)
        return torch.where(count >= max(2, window // 2), limit, torch.nan)

    def _now(self, device: torch.device) -> tuple[Tensor, Tensor]:
        norms, count = self._history["norms"], self._history["count"]
        assert isinstance(norms, Tensor)
        if norms.device != device:
            norms = norms.to(device, transfer.widest(device), non_blocking=True)
            self._history["norms"] = norms
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=norms.dtype, device=device)
        return norms, count.to(device)

    def _remember(self, norm: Tensor, valid: Tensor) -> None:
        norms, count = self._now(norm.device)
        added = torch.cat([norms[1:], norm.to(norms.dtype).view(1)])
        self._history["norms"] = torch.where(valid, added, norms)
        more = (count + valid.to(count.dtype)).clamp(max=len(norms))
        self._history["count"] = transfer.read(more)

    def _on_device(
        self,
        norm: Tensor,
        limit: Tensor,
        weights: Sequence[Tensor],
        backwards: Sequence[Tensor],
        decision: Decision,
    ) -> Decision:
        """Limit the update without telling the host."""
        over = norm > limit  # never of a NaN
        coef = torch.where(over, limit / norm, 1.0)
        for weight, back in zip(weights, backwards, strict=True):
            weight.add_(back * (1.0 - coef).to(back.dtype))
        self._remember(norm, torch.isfinite(norm) & (norm > 0))
        clipped = over.to(norm.dtype)
        done = replace(
            decision,
            coef=coef,
            clipped=clipped,
            fraction=clipped,
            max_stat=norm,
            threshold=limit,
            update=None,
        )
        return done.where(decision.finite) if isinstance(decision.finite, Tensor) else done
