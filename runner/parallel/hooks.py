"""Gradient hooks that users registered on parameters which a plugin replaces.

Hooks of ``register_hook`` are registered on the replacement: they get the whole gradient of this
rank's samples, as under DDP. Hooks of ``register_post_accumulate_grad_hook`` are refused: they get
the parameter itself, and changes of a shard or of a temporary copy would be wrong or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef

from runner.clip.shard import local
from runner.config.notation import first_few
from runner.parallel.placements import full, sharded

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
"""Hooks of one parameter. The handle of a hook removes it from this mapping."""


class HookError(ValueError):
    """A parameter has a gradient hook that cannot run under a plugin."""


def post_accumulate_hooked(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of parameters that have a post-accumulate hook."""
    return [name for name, parameter in named if parameter._post_accumulate_grad_hooks]


def require_no_post_accumulate(named: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Refuse hooks of ``register_post_accumulate_grad_hook``."""
    if names := post_accumulate_hooked(named):
        raise HookError(
            f"{first_few(names)}: a hook of register_post_accumulate_grad_hook cannot "
            f"run here, because {why}: use register_hook, which is carried over, or plugin=ddp"
        )


def carry_over(hooks: Hooks | None, replacement: nn.Parameter) -> None:
    """Register the hooks of a parameter (its ``_backward_hooks``) on its replacement.

    Hooks on a DTensor get the whole gradient as a plain tensor.
    """
    if hooks:
        placements = replacement.placements if isinstance(replacement, DTensor) else ()
        register(partial(_run, hooks, placements), replacement)


class Apart:
    """A gradient hook that copies a gradient which shares its memory with another parameter's.

    Microbatches are added to gradients in place, so to a shared one they would be added twice.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return a copy if a gradient that the hook saw before has the same memory."""
        storage = local(gradient).untyped_storage()
        held = self._storages.get(storage._cdata)
        if held is not None and not held.expired():  # type: ignore[no-untyped-call]
            return gradient.clone()
        self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return None

    def forget(self) -> None:
        """Forget the gradients of earlier backward passes."""
        self._storages.clear()


def register(hook: Callable[[Tensor], Tensor | None], parameter: nn.Parameter) -> None:
    """Register a gradient hook on ``parameter``, even if it is frozen and unfrozen later."""
    required = parameter.requires_grad
    parameter.requires_grad_().register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(required)


def register_post_accumulate(hook: Callable[[Tensor], None], parameter: nn.Parameter) -> None:
    """Register a hook on ``parameter`` that runs when its gradient has been accumulated.

    Also if it is frozen and unfrozen later.
    """
    required = parameter.requires_grad
    parameter.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(required)


@torch.no_grad()
def _run(hooks: Hooks, placements: tuple[Placement, ...], gradient: Tensor) -> Tensor:
    whole = full(gradient)
    for hook in list(hooks.values()):
        changed = hook(whole)
        whole = whole if changed is None else changed
    if isinstance(gradient, DTensor):
        return sharded(whole, gradient.device_mesh, placements)
    return whole
