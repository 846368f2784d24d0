"""Check that tensor-parallel ranks have equal gradients of replicated parameters.

If a replicated parameter is applied to the output of a sharded layer (a norm of single heads), each
rank has only a part of its gradient. Without the check its replicas would silently diverge.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.clip.shard import local
from runner.config.notation import first_few
from runner.parallel.tensor_styles import PlanError

TOLERANCE = (0.01, 0.05)
"""Largest relative difference that rounding explains, also in half precision; parts of a sum differ
by far more."""

LEAST = 1e-3
"""Fraction of the largest gradient norm below which a gradient may be rounding errors only, such as
that of a key's bias."""


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that all tensor-parallel ranks hold, by name."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                found[name] = parameter
    return found


class ReplicaCheck:
    """Callable that compares gradients over ranks in the first step, with one collective.

    Every rank calls it once per step, when gradients are final. A gradient that is zero on all
    ranks (because a later layer starts at zero) is checked again in the next step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.waiting = dict(parameters)
        self.group = group
        self._largest = 0.0

    @torch.no_grad()
    def __call__(self) -> None:
        if not self.waiting:
            return
        # On the host, in float64.
        own = torch.stack([_fingerprint(p) for p in self.waiting.values()])
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(rows, own, group=self.group)
        prints = torch.stack(rows)
        if not bool(prints.isfinite().all()):
            return  # An overflow: checked in the next step.
        sizes: list[float] = prints[..., 0].amax(0).tolist()
        spread: list[float] = (prints.amax(0) - prints.amin(0)).amax(1).tolist()
        first = self._largest == 0
        self._largest = max(self._largest, *sizes)
        if self._largest == 0:
            return
        found = list(zip(self.waiting.items(), sizes, spread, strict=True))
        if apart := [
            name
            for (name, parameter), size, off in found
            if off > TOLERANCE[parameter.dtype.itemsize < 4] * max(size, LEAST * self._largest)
        ]:
            raise PlanError(
                f"{first_few(apart, 8)}: the gradient differs between tensor ranks, each of which "
                "sees a part of what this parameter works on: in the plan, give its module the "
                "style replicated_with_grad_allreduce (if the ranks draw different random numbers, "
                "seed them alike)"
            )
        self.waiting = {name: p for (name, p), size, _ in found if first and size == 0}


def _fingerprint(parameter: nn.Parameter) -> Tensor:
    """Return the gradient's norm, and its dot product with a random vector, equal on all ranks."""
    if parameter.grad is None:
        return torch.zeros(2, dtype=torch.float64)
    gradient = local(parameter.grad)
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    same = torch.Generator(gradient.device).manual_seed(0)
    drawn = torch.empty_like(gradient).normal_(generator=same)
    return torch.stack([gradient.norm(), (gradient * drawn).sum()]).cpu().double()
