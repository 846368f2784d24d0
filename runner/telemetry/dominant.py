"""Which parameters make most of the gradient: their shares in ‖G‖^p, step by step.

The share of a parameter is Σ|g|^p of its elements ÷ ‖G‖^p. It follows from what clipping measured
already. What this rank knows of a step lies in one vector, which stays on the device until metrics
travel to the host; one collective then adds up the vectors of all steps that travel.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.gradients import Layout
from runner.gradients.norms import Norms

SPIKE = 5.0  # a step is a spike if its ‖G‖ is above the median so many times
FEW = 0.1  # share of the steps up to which they are called spikes; norms that fall have more
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
        of_steps = norms[len(norms) - len(self.first) :]
        finite = [norm for norm in of_steps if math.isfinite(norm)]
        if not finite:
            return {}
        bound = SPIKE * median(finite)
        is_spike = [norm > bound for norm in of_steps]
        facts = {"clipped": self._leader(self.clipped)}
        if sum(is_spike) <= FEW * len(is_spike):
            facts["spikes"] = self._leader(is_spike)
        return {kind: leader for kind, leader in facts.items() if leader is not None}

    def _leader(self, chosen: Sequence[int]) -> dict[str, Any] | None:
        """Return the parameter that led most of the chosen steps, and its mean share in these."""
        shares: dict[int, list[float]] = {}
        for is_chosen, position, share in zip(chosen, self.first, self.shares, strict=True):
            if is_chosen and position != _NONE:
                shares.setdefault(position, []).append(share)
        if not shares:
            return None
        most = max(shares, key=lambda position: len(shares[position]))
        return {
            "name": self.names[most],
            "share": math.fsum(shares[most]) / len(shares[most]),
            "leads": len(shares[most]),
            "steps": sum([1 for is_chosen in chosen if is_chosen]),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "first": torch.tensor(self.first.tolist(), dtype=torch.int64),
            "shares": torch.tensor(self.shares.tolist(), dtype=torch.float64),
            "clipped": torch.tensor(self.clipped.tolist(), dtype=torch.int8),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.names = list(state["names"])
        self.first = array("l", state["first"].tolist())
        self.shares = array("d", state["shares"].tolist())
        self.clipped = array("b", state["clipped"].tolist())
