"""Which parameters make most of the gradient: their shares in ‖G‖^p, step by step.

The share of a parameter is Σ|g|^p of its elements ÷ ‖G‖^p. It follows from what clipping measured
already. What this rank knows of a step lies in one vector, which stays on the device until metrics
travel to the host; one collective then adds up the vectors of all steps that travel.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.gradients import Layout
from runner.gradients.norms import Norms

SPIKE = 5.0  # a step is a spike if its ‖G‖ is above the median so many times
_DIGITS = 6  # of a share: a sum over ranks may differ in its last bit with the steps beside it
_NONE = -1  # in place of a name, for a step of which no share is known


class Dominant:
    """Names the parameters that make most of ‖G‖^p.

    Args:
        layout: where the gradients are.
        norm_type: p, which is finite.
        number: how many parameters of a step are named, the largest share first.
    """

    def __init__(self, layout: Layout, norm_type: float, number: int) -> None:
        self.layout = layout
        self.norm_type = norm_type
        self._number = min(number, len(layout.names))

    def of_step(self, norms: Norms | None) -> Tensor | None:
        """Return this rank's part of Σ|g|^p of each parameter, [parameters]; None if not known."""
        if norms is None or norms.shares is None:
            return None
        return norms.of_parameters(self.layout)

    def over_ranks(self, parts: Sequence[Tensor]) -> list[dict[str, float]]:
        """Return the largest shares of some steps by name; a collective, and the host waits.

        A step whose gradient is zero or not finite has none.
        """
        powers = self.layout.sum(torch.stack(list(parts)))
        shares = powers / powers.sum(dim=1, keepdim=True)
        largest, positions = shares.topk(self._number, dim=1)
        # Two tensors of one type travel in one transfer.
        rows = torch.cat([largest, positions.to(largest.dtype)], dim=1).tolist()
        return [self._named(row[: self._number], row[self._number :]) for row in rows]

    def _named(self, shares: Sequence[float], positions: Sequence[float]) -> dict[str, float]:
        pairs = []
        for share, position in zip(shares, positions, strict=True):
            if math.isfinite(share) and round(share, _DIGITS) > 0:
                pairs.append((-round(share, _DIGITS), int(position)))
        return {self.layout.names[position]: -share for share, position in sorted(pairs)}


@dataclass
class Leaders:
    """The parameter with the largest share in each step, and what that says of a run."""

    names: list[str] = field(default_factory=list)  # of all parameters that led a step
    first: array[int] = field(default_factory=lambda: array("l"))  # positions in ``names``
    shares: array[float] = field(default_factory=lambda: array("d"))
    clipped: array[int] = field(default_factory=lambda: array("b"))  # 1: clipped, or skipped

    def add(self, top: Mapping[str, float], clipped: bool) -> None:
        """Add a step, given its largest shares by name, the largest first."""
        name, share = next(iter(top.items()), ("", math.nan))
        if name and name not in self.names:
            self.names.append(name)
        self.first.append(self.names.index(name) if name else _NONE)
        self.shares.append(share)
        self.clipped.append(int(clipped))

    def facts(self, norms: Sequence[float]) -> dict[str, Any]:
        """Return who led the clipped steps, and who led the spikes, given ‖G‖ of all steps."""
        last = len(self.first)
        of_steps = np.asarray(norms, dtype=np.float64)[-last:] if last else np.empty(0)
        finite = of_steps[np.isfinite(of_steps)]
        median = float(np.median(finite)) if finite.size else math.inf
        facts = {
            "clipped": self._leader(np.asarray(self.clipped) == 1),
            "spikes": self._leader(of_steps > SPIKE * median),
        }
        return {kind: leader for kind, leader in facts.items() if leader is not None}

    def _leader(self, chosen: np.ndarray[Any, Any]) -> dict[str, Any] | None:
        """Return the parameter that led most of the chosen steps, and its mean share in these."""
        led = chosen & (np.asarray(self.first) != _NONE)
        if not led.any():
            return None
        [(position, steps)] = Counter(np.asarray(self.first)[led].tolist()).most_common(1)
        shares = np.asarray(self.shares)[led & (np.asarray(self.first) == position)]
        return {
            "name": self.names[position],
            "share": float(shares.mean()),
            "leads": steps,
            "steps": int(chosen.sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "first": torch.from_numpy(np.array(self.first)),
            "shares": torch.from_numpy(np.array(self.shares)),
            "clipped": torch.from_numpy(np.array(self.clipped)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.names = list(state["names"])
        self.first = array("l", state["first"].tolist())
        self.shares = array("d", state["shares"].tolist())
        self.clipped = array("b", state["clipped"].tolist())
