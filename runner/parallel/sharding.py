"""Sharding over data-parallel ranks by torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_leaves

from runner.config.notation import first_few
from runner.parallel.collectives import is_first
from runner.parallel.hooks import Usage, held_tensors
from runner.parallel.mesh import mixtures

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """Options of ``fully_shard``, as :class:`runner.booster.TorchFSDPPlugin` describes them."""

    reshard_after_forward: bool = True
    param_dtype: torch.dtype | None = None
    cpu_offload: bool = False

    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if self.param_dtype is not None:
            given["mp_policy"] = MixedPrecisionPolicy(self.param_dtype, torch.float32)
        if self.cpu_offload:
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return given


def shard_model(
    root: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding,
    usage: Usage,
    experts: DeviceMesh | None = None,
    ends: bool = True,
) -> None:
    """Shard each block (an element of a ModuleList, except experts), then the rest of ``root``."""
    _prepare(root)
    options = sharding.options()
    hooks = {
        (module, key): parameter._backward_hooks
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter._backward_hooks
    }
    for _, mixture in mixtures(root) if experts is not None else ():
        for expert in mixture.get_submodule("experts").children():
            if any(True for _ in expert.parameters()):
                fully_shard(expert, mesh=experts, **options)
    # Experts are gathered with their block, because a rank may run only some of them.
    lists = [
        module
        for name, module in root.named_modules()
        if isinstance(module, nn.ModuleList) and "experts" not in name.split(".")
    ]
    # Innermost first: a block shards the parameters that are not in blocks inside it.
    for blocks in reversed(lists):
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=mesh, **options)
    if ends and sharding.param_dtype is not None:
        # Losses are computed in full precision.
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=torch.float32)
    fully_shard(root, mesh=mesh, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(_require_seen)
    # Otherwise ranks that use different parameters would sum gradients of different parameters.
    # `usage` sets the gradients of parameters that no rank used back to None.
    assert isinstance(root, FSDPModule)
    root.set_reduce_scatter_unused_params(True)
    try:
        usage.watch(root, hooks)
    except AssertionError as error:
        usual = Counter(parameter.dtype for parameter in root.parameters()).most_common(1)[0][0]
        for name, parameter in root.named_parameters():
            if parameter.dtype != usual:
                raise ValueError(
                    f"{name} is {parameter.dtype}, and others of its block are {usual}: "
                    "fully_shard needs one dtype in a block. Convert it, or choose "
                    "TorchDDPPlugin (plugin=ddp) or zero_stage=1"
                ) from error
        raise


def _require_seen(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Refuse outputs in which fully_shard finds no tensors: it would reduce no gradients."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    known = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if any(leaf.requires_grad for leaf in known):
        return
    if any(held.requires_grad for held in held_tensors(outputs)):
        raise TypeError(
            f"{type(module).__name__} returns tensors in a {type(outputs).__name__}, in which "
            "fully_shard finds none: return a tensor, a tuple or a dictionary, or choose "
            "TorchDDPPlugin (plugin=ddp) or zero_stage=1"
        )


def _prepare(root: nn.Module) -> None:
    """Refuse empty parameters, and convert channels-last weights: fully_shard supports neither."""
    changed = []
    for name, parameter in root.named_parameters():
        if not parameter.numel():
            raise ValueError(
                f"{name} has no elements, and fully_shard cannot reduce its gradient: leave it out "
                "of the model, or choose TorchDDPPlugin (plugin=ddp) or zero_stage=1"
            )
        if not parameter.is_contiguous():
            changed.append(name)
            parameter.data = parameter.data.contiguous()
    if changed and is_first():
        log.warning(
            "made contiguous, because fully_shard keeps no other memory format (channels_last): %s",
            first_few(changed),
        )


def reshard(roots: Iterable[nn.Module]) -> None:
    """Reshard the parameters of ``roots``: unsharded copies are stale after ``step()``.

    The backward pass reshards them, but a forward pass between it and the step unshards them again.
    """
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def unsynchronised(model: nn.Module, averagings: Iterable[Any] = ()) -> Iterator[None]:
    """Reduce no gradients of a sharded ``model``, and average none early, in passes inside."""

    def synchronise(on: bool) -> None:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(on)
        for averaging in averagings:
            averaging.held = not on

    synchronise(False)
    try:
        yield
    finally:
        synchronise(True)
