"""Whether ranks that hold the same parameter have the same gradient for it.

Under tensor parallelism a parameter that no style splits is repeated on each rank. Where it works
on a part of what a split layer computes (a norm of single heads), each rank has a part of its
gradient, and the copies would drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.clip.layout import local
from runner.parallel.tensor_styles import PlanError

TOLERANCE = 0.01
"""Largest relative difference that is taken for rounding; parts of a sum differ by far more."""

HALF_TOLERANCE = 0.05
"""The same of parameters in half precision."""

LEAST = 1e-3
"""Of the largest gradient: what is smaller may be rounding alone (that of a key's bias)."""


def repeated(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters that every tensor rank holds alike, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad and _whole(p)}


def _whole(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in axes and parameter.placements[axes.index("tp")].is_replicate()


class Agreement:
    """Called once a step, on every rank, when gradients are final; it looks at the first ones.

    Each gradient by two figures, in one collective. One that is zero on all ranks, as behind a
    layer that begins at zero, is looked at once more in the next step.

    Args:
        parameters: by name, in the same order on every rank of the group.
        group: the tensor ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.waiting = dict(parameters)
        self.group = group
        self._largest = 0.0

    @torch.no_grad()
    def __call__(self) -> None:
        """Compare.

        Raises:
            PlanError: gradients differ; the message names their parameters.
        """
        if not self.waiting:
            return
        # On the host, in float64, whatever the gradients are.
        own = torch.stack([_figures(p) for p in self.waiting.values()])
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(rows, own, group=self.group)
        figures = torch.stack(rows)
        if not bool(figures.isfinite().all()):
            return  # An overflow: the next step will tell.
        sizes: list[float] = figures[..., 0].amax(0).tolist()
        spread: list[float] = (figures.amax(0) - figures.amin(0)).amax(1).tolist()
        first = self._largest == 0
        self._largest = max(self._largest, *sizes)
        if self._largest == 0:
            return
        found = list(zip(self.waiting.items(), sizes, spread, strict=True))
        apart = [
            name
            for (name, parameter), size, off in found
            if off > _tolerance(parameter) * max(size, LEAST * self._largest)
        ]
        if apart:
            raise PlanError(_said(apart))
        self.waiting = {name: p for (name, p), size, _ in found if first and size == 0}


def _figures(parameter: nn.Parameter) -> Tensor:
    """Norm of the gradient, and its product with numbers that all ranks draw alike."""
    if parameter.grad is None:
        return torch.zeros(2, dtype=torch.float64)
    gradient = local(parameter.grad)
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    drawn = torch.randn(
        gradient.shape,
        generator=torch.Generator(gradient.device).manual_seed(0),
        dtype=gradient.dtype,
        device=gradient.device,
    )
    return torch.stack([gradient.norm(), (gradient * drawn).sum()]).cpu().double()


def _tolerance(parameter: nn.Parameter) -> float:
    return HALF_TOLERANCE if parameter.dtype.itemsize < 4 else TOLERANCE


def _said(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (
        f"{', '.join(names[:8])}{more}: the gradient differs between tensor ranks, each of which "
        "sees a part of what this parameter works on: in the plan, give its module the style "
        "replicated_with_grad_allreduce (if the ranks draw different random numbers, seed them "
        "alike)"
    )
