"""Gradient hooks that users registered on parameters, where a plugin replaces the parameters.

A hook of ``register_hook`` is carried over: it gets the whole gradient of this rank's samples, as
under DDP. A hook of ``register_post_accumulate_grad_hook`` gets the parameter itself, and what it
did to a part or a temporary copy of it would be wrong or lost, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
"""Hooks of one parameter. A handle's ``remove()`` takes its hook out of this mapping."""


class HookError(ValueError):
    """A parameter has a gradient hook that cannot run under a plugin."""


def gradient_hooks(parameter: Tensor) -> Hooks | None:
    """Return the hooks that ``register_hook`` put on ``parameter``, None if there are none."""
    return parameter._backward_hooks or None


def post_accumulate_hooked(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """List the names of parameters that have a post-accumulate hook."""
    return [name for name, parameter in named if parameter._post_accumulate_grad_hooks]


def require_no_post_accumulate(named: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Refuse hooks of ``register_post_accumulate_grad_hook``.

    Args:
        named: parameters with their names, before they are replaced.
        why: what the plugin does with a parameter, to follow "because".

    Raises:
        HookError: a parameter has such a hook; the message names it.
    """
    names = post_accumulate_hooked(named)
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise HookError(
            f"{', '.join(names[:5])}{more}: a hook of register_post_accumulate_grad_hook cannot "
            f"run here, because {why}: use register_hook, which is carried over, or plugin=ddp"
        )


def carry_over(hooks: Hooks, parameter: nn.Parameter) -> None:
    """Run ``hooks`` on the gradients of ``parameter``, which replaces the parameter they were on.

    Args:
        hooks: from :func:`gradient_hooks`.
        parameter: plain, or a DTensor; hooks get the whole gradient of a DTensor as a plain tensor.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    register(partial(_run, hooks, placements), parameter)


def register(hook: Callable[[Tensor], Tensor | None], parameter: nn.Parameter) -> None:
    """Register a gradient hook on ``parameter``, also where it is frozen and unfrozen later."""
    required = parameter.requires_grad
    parameter.requires_grad_().register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(required)


@torch.no_grad()
def _run(hooks: Hooks, placements: tuple[Placement, ...], gradient: Tensor) -> Tensor:
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    for hook in list(hooks.values()):
        changed = hook(whole)
        whole = whole if changed is None else changed
    if isinstance(gradient, DTensor):
        # The ranks have the same whole gradient: each takes its own part of it.
        return distribute_tensor(whole, gradient.device_mesh, placements, src_data_rank=None)
    return whole
