"""Sharding over data-parallel ranks by torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_leaves

from runner.config.notation import first_few
from runner.parallel.hooks import Usage, held_tensors
from runner.parallel.mesh import mixtures


def shard_model(
    root: nn.Module,
    mesh: DeviceMesh,
    options: Mapping[str, Any],
    usage: Usage,
    device: torch.device,
    experts: DeviceMesh | None = None,
    ends: bool = True,
) -> None:
    """Shard each block (an element of a ModuleList, except experts), then the rest of ``root``.

    Args:
        root: a model, or the stage of a pipeline.
        mesh: the data-parallel ranks.
        options: options of ``fully_shard``.
        usage: watches which parameters a window uses.
        device: where shards are allocated, without values.
        experts: the data-parallel ranks that hold the same experts; None if all do.
        ends: whether ``root`` returns the outputs of the model.
    """
    _require_elements(root)
    hooks = _backward_hooks_of(root)
    _replace_by_meta(root)
    if experts is not None:
        for expert in _experts_of(root):
            fully_shard(expert, mesh=experts, **options)
    # Innermost first: a block shards the parameters that are not in blocks inside it.
    for _, blocks in reversed(block_lists(root)):
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=mesh, **options)
    if ends and "mp_policy" in options:  # Losses are computed in full precision.
        full = replace(options["mp_policy"], output_dtype=torch.float32)
        options = {**options, "mp_policy": full}
    fully_shard(root, mesh=mesh, **options)
    root.to_empty(device=device)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(_require_seen)
    # Otherwise ranks that use different parameters would sum gradients of different parameters.
    # `usage` sets the gradients of parameters that no rank used back to None.
    assert isinstance(root, FSDPModule)
    root.set_reduce_scatter_unused_params(True)
    usage.watch(root, hooks)


def _backward_hooks_of(root: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return the hooks of parameters by module and key."""
    hooks = {}
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter._backward_hooks:
                hooks[module, key] = parameter._backward_hooks
    return hooks


def _experts_of(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the experts of all mixtures that have parameters."""
    for _, mixture in mixtures(root):
        for expert in mixture.get_submodule("experts").children():
            if next(expert.parameters(), None) is not None:
                yield expert


def block_lists(root: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of blocks by name, outermost first.

    Experts are gathered with their block, because a rank may run only some of them.
    """
    return [
        (name, module)
        for name, module in root.named_modules()
        if isinstance(module, nn.ModuleList) and "experts" not in name.split(".")
    ]


def why_not_shardable(root: nn.Module, experts_apart: bool = False) -> str | None:
    """Return why ``fully_shard`` cannot shard the blocks of a model, or None.

    Args:
        root: the model, before it is sharded.
        experts_apart: True if each expert is sharded by itself.
    """
    blocks = _names_of_blocks(root, experts_apart)
    return _mixed_dtypes(root, blocks) or _shared_by_blocks(root, blocks)


def _mixed_dtypes(root: nn.Module, blocks: Collection[str]) -> str | None:
    """Return what to do about parameters of several dtypes in one block, or None."""
    for block, names in _names_by_dtype(root, blocks).items():
        if len(names) > 1:
            listed = (f"{dtype} ({first_few(keys, 2)})" for dtype, keys in names.items())
            return (
                f"{block or 'the model'} has parameters of several dtypes, {' and '.join(listed)}, "
                "which fully_shard cannot gather together: convert them to one dtype "
                "(precision=bf16 computes float32 ones in bfloat16), or choose TorchDDPPlugin "
                "(plugin=ddp) or zero_stage=1"
            )
    return None


def _shared_by_blocks(root: nn.Module, blocks: Collection[str]) -> str | None:
    """Return what to do about a parameter of two blocks, or of a block and the rest, or None."""
    places: dict[nn.Parameter, tuple[str, str]] = {}  # by parameter: its first name, and its block
    for name, module, block in _modules_with_blocks(root, blocks):
        for key, parameter in module.named_parameters(name, recurse=False):
            first_name, first_block = places.setdefault(parameter, (key, block))
            if block != first_block:
                return (
                    f"{first_name} and {key} are one parameter, but not in one block, and "
                    "fully_shard would shard it twice: give each its own, or choose TorchDDPPlugin "
                    "(plugin=ddp) or zero_stage=1"
                )
    return None


def _names_of_blocks(root: nn.Module, experts_apart: bool) -> set[str]:
    """Return the names of the modules that are sharded by themselves, besides ``root``."""
    blocks = set()
    for name, modules in block_lists(root):
        blocks |= {f"{name}.{number}" for number in range(len(modules))}
    if experts_apart:
        for name, mixture in mixtures(root):
            number_of_experts = len(list(mixture.get_submodule("experts").children()))
            blocks |= {f"{name}.experts.{number}" for number in range(number_of_experts)}
    return blocks


def _modules_with_blocks(
    root: nn.Module, blocks: Collection[str]
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each module by all of its names, with the name of the innermost block around it."""
    name_of_block = {root.get_submodule(name): name for name in blocks}
    block_of: dict[str, str] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        around = block_of.get(name.rpartition(".")[0], "")
        block_of[name] = name_of_block.get(module, around)
        yield name, module, block_of[name]


def _names_by_dtype(
    root: nn.Module, blocks: Collection[str]
) -> dict[str, dict[torch.dtype, list[str]]]:
    """Return the names of the parameters that train, by innermost block and by dtype."""
    names: dict[str, dict[torch.dtype, list[str]]] = {}
    for name, module, block in _modules_with_blocks(root, blocks):
        for key, parameter in module.named_parameters(name, recurse=False):
            if parameter.requires_grad:
                in_block = names.setdefault(block, {})
                in_block.setdefault(parameter.dtype, []).append(key)
    return names


def _require_seen(module: nn.Module, inputs: Any, outputs: Any) -> None:
    """Refuse outputs in which fully_shard finds no tensors: it would reduce no gradients."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if any(leaf.requires_grad for leaf in leaves):
        return
    if any(tensor.requires_grad for tensor in held_tensors(outputs)):
        raise TypeError(
            f"{type(module).__name__} returns tensors in a {type(outputs).__name__}, in which "
            "fully_shard finds none: return a tensor, a tuple or a dictionary, or choose "
            "TorchDDPPlugin (plugin=ddp) or zero_stage=1"
        )


def _require_elements(root: nn.Module) -> None:
    """Refuse empty parameters, which fully_shard does not support."""
    for name, parameter in root.named_parameters():
        if not parameter.numel():
            raise ValueError(
                f"{name} has no elements, and fully_shard cannot reduce its gradient: leave it out "
                "of the model, or choose TorchDDPPlugin (plugin=ddp) or zero_stage=1"
            )


def _replace_by_meta(root: nn.Module) -> None:
    """Replace parameters by ones without memory, so that no device holds them whole.

    They are contiguous, because fully_shard does not support channels-last weights.
    """
    # Each original parameter with its new one, by the id of the original, which is kept alive so
    # that no other tensor gets this id.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in root.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                empty = torch.empty_like(
                    parameter.detach(), device="meta", memory_format=torch.contiguous_format
                )
                new_parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                replaced[id(parameter)] = parameter, new_parameter
            setattr(module, key, replaced[id(parameter)][1])


def reshard(roots: Iterable[nn.Module]) -> None:
    """Reshard what a forward pass before the step has unsharded: copies are stale after it."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def hold(model: nn.Module, averagings: Iterable[Any], held: bool) -> None:
    """Reduce no gradients of a sharded ``model``, and average none early, while ``held``."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not held)
    for averaging in averagings:
        averaging.held = held
