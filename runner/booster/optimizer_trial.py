"""Trial steps: does an optimizer step one parameter by others, and is its step on shards correct?

A trial builds a new optimizer of the same class and options over small float64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from runner.clip.like import Groups, optimizer_like, step_with
from runner.parallel.full_state_dict import full, sharded

TRIAL_STEPS = 3
"""The first step of an Adam does not depend on the size of gradients; later ones do."""

TOLERANCE = 1e-6
"""Largest relative difference of two float64 updates that should be equal."""


def steps_by_others(optimizer: Optimizer) -> bool:
    """Return whether the updates of some tensors change if the optimizer holds other tensors too.

    Also False if the class cannot be built from its options, because then nothing is known.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # On the device of the parameters: some options (capturable) need an accelerator.
    device = held[0].device if held else torch.device("cpu")
    few: Groups = []
    for group in optimizer.param_groups:
        dims = sorted({parameter.ndim for parameter in group["params"]}) or [2]
        few.append(
            [torch.ones((4, 3, *[2] * n)[:n], dtype=torch.float64, device=device) for n in dims]
        )
    more = [[*group, *group] for group in few]
    # Gradients of the other tensors are larger, and grow with each step.
    steps = [
        [
            [
                _random(tensor, 100 * step + i, device) * (1.0 if i < len(own) else 10.0**step)
                for i, tensor in enumerate(group)
            ]
            for group, own in zip(more, few, strict=True)
        ]
        for step in range(1, TRIAL_STEPS + 1)
    ]
    own_steps = [[group[: len(group) // 2] for group in step] for step in steps]
    try:
        alone = _updates(optimizer, few, own_steps)
        together = _updates(optimizer, more, steps)
        return any(
            _difference(a, b) > TOLERANCE
            for one, both in zip(alone, together, strict=True)
            for a, b in zip(one, both, strict=False)
        )
    except Exception:
        return False


def error_on_shards(optimizer: Optimizer, mesh: DeviceMesh) -> float:
    """Return the largest relative error of updates of sharded tensors.

    The reference is the same optimizer on whole tensors. The error is 0 if that cannot be built.
    """
    groups = [_examples(group["params"], mesh) for group in optimizer.param_groups]
    device = torch.device(mesh.device_type)
    # The values of the parameters, then the gradients of each step.
    whole = [
        [[_random(p, 100 * step + i, device) for i, p in enumerate(group)] for group in groups]
        for step in range(TRIAL_STEPS + 1)
    ]
    parts = [
        tree_map(lambda values, p: sharded(values, mesh, p.placements), drawn, groups)
        for drawn in whole
    ]
    try:
        wanted = _updates(optimizer, whole[0], whole[1:])
    except Exception:
        return 0.0
    found = _updates(optimizer, parts[0], parts[1:])
    return max(map(_difference, chain(*wanted), map(full, chain(*found))))


def error_of_parts(
    optimizer: Optimizer, step_some: Callable[[Optimizer, dict[int, list[Any]]], None]
) -> float:
    """Return the largest relative difference of updates that are computed tensor by tensor."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = held and held[0].device.type != "meta"
    device = held[0].device if known else torch.device("cpu")
    starts: Groups = []
    for group in optimizer.param_groups:
        dims = sorted({parameter.ndim for parameter in group["params"]}) or [2]
        shapes = [(4, 3, *[2] * n)[:n] for n in dims for _ in range(2)]
        starts.append([torch.ones(s, dtype=torch.float64, device=device) for s in shapes])
    steps = [
        [[_random(t, 100 * step + i, device) for i, t in enumerate(group)] for group in starts]
        for step in range(1, TRIAL_STEPS + 1)
    ]

    def one_by_one(made: Optimizer, gradients: Groups) -> None:
        for number, (group, own) in enumerate(zip(made.param_groups, gradients, strict=True)):
            for parameter, gradient in zip([*group["params"]], own, strict=True):
                parameter.grad = gradient.clone()
                step_some(made, {number: [parameter]})

    whole = _updates(optimizer, starts, steps)
    parts = _updates(optimizer, starts, steps, one_by_one)
    return max(map(_difference, chain(*whole), chain(*parts)), default=0.0)


def _examples(parameters: Iterable[Tensor], mesh: DeviceMesh) -> list[DTensor]:
    """Return the smallest parameter on ``mesh`` for each number of dimensions and placement."""
    listed = [p for p in parameters if isinstance(p, DTensor) and p.device_mesh == mesh]
    smallest: dict[Any, DTensor] = {}
    for parameter in sorted(listed, key=lambda p: p.numel()):
        smallest.setdefault((parameter.ndim, parameter.placements), parameter)
    return list(smallest.values())


def _random(like: Tensor, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(device)


def _updates(
    optimizer: Optimizer,
    starts: Groups,
    steps: Sequence[Groups],
    take: Callable[[Optimizer, Groups], None] = step_with,
) -> Groups:
    """Return what an optimizer like ``optimizer`` adds to ``starts``, given gradients of steps."""
    made = optimizer_like(optimizer, starts)
    for gradients in steps:
        take(made, gradients)
    groups = [group["params"] for group in made.param_groups]
    updates: Groups = tree_map(lambda parameter, start: parameter.detach() - start, groups, starts)
    return updates


def _difference(wanted: Tensor, got: Tensor) -> float:
    """Return the relative difference of two updates by L2 norm."""
    if not wanted.numel():
        return 0.0
    off = float((wanted - got).norm())
    return off / max(float(wanted.norm()), 1e-30) if off else 0.0
