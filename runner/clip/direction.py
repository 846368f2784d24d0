"""How far clipping turns a gradient: the cosine of the angle between it before and after.

One coefficient for the whole gradient keeps its direction: the cosine is 1. Where each tensor has a
coefficient of its own, the cosine follows from the norms of the tensors. Modes that clip elements
or units need a copy of the gradient, and a dot product of both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision
from runner.clip.layout import Layout
from runner.clip.norms import Powers, flatten, local_powers

BLOCK = 2**16
"""Elements that are multiplied together on a CPU: they and their copies in float64 stay in a
cache."""


class Direction:
    """Compares the gradient before clipping with the gradient after it.

    Make it when the mode has decided and no gradient has changed; the host does not wait for an
    accelerator, and there is no collective.
    """

    @torch.no_grad()
    def __init__(
        self, layout: Layout, decision: Decision | None, powers: Powers | None = None
    ) -> None:
        self._layout = layout
        self._before: dict[int, Tensor] | None = None
        self._sums: Tensor | None = None
        if decision is None or decision.parts is not None:
            shards, gradients = layout.gradients()
            copies = [gradient.clone() for gradient in gradients]
            self._before = dict(zip(map(id, shards), copies, strict=True))
        elif decision.finite is not False:
            scales = _scales(layout, decision)
            self._sums = None if scales is None else _from_norms(layout, scales, powers)

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Return this rank's share of three sums over all elements, once the gradient is
        clipped.
        """
        device = self._layout.device
        before, self._before = self._before, None
        if before is None:
            same = transfer.on_device([1.0, 1.0, 1.0], device)
            return same if self._sums is None else self._sums
        shards, gradients = self._layout.gradients()
        total = torch.zeros(3, dtype=transfer.widest(device), device=device)
        for shard, after in zip(shards, gradients, strict=True):
            total += _products(before[id(shard)], after) / shard.num_replicas
        return total


def cosine(sums: Sequence[float]) -> float | None:
    """Return the cosine, given :meth:`Direction.sums` of all ranks; None where it is undefined."""
    product, before, after = sums
    length = (before * after) ** 0.5
    return product / length if length > 0.0 else None


def _scales(layout: Layout, decision: Decision) -> Tensor | None:
    """Return the factor of each parameter, [parameters]; None where all have the same one."""
    if decision.scales is not None or decision.factor is None:
        return decision.scales
    device = layout.device
    scaled = transfer.on_device([float(one.scaled) for one in layout.parameters.values()], device)
    return 1.0 + scaled * (decision.factor - 1.0)


def _from_norms(layout: Layout, scales: Tensor, powers: Powers | None) -> Tensor:
    """Return the three sums, given the factor of each parameter."""
    if powers is None or powers.norm_type != 2.0:
        powers = local_powers(layout, 2.0, each=True)[1]
        assert powers is not None
    shares = powers.of_parameters(layout)
    return torch.stack([(shares * scales).sum(), shares.sum(), (shares * scales.square()).sum()])


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ ab, Σ a² and Σ b², [3], summed in the widest type of the device."""
    same = a.stride() == b.stride()
    a, b = (flatten(each) if same else each.reshape(-1) for each in (a, b))
    wide = transfer.widest(a.device)
    if not transfer.can_read(a.device):
        a, b = a.to(wide), b.to(wide)
        return torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])
    total = torch.zeros(3, dtype=wide)
    for x, y in zip(torch.split(a, BLOCK), torch.split(b, BLOCK), strict=True):
        x, y = x.to(wide), y.to(wide)
        total += torch.stack([torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)])
    return total
