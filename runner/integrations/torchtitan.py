"""A function in the place of torchtitan's ``clip_grad_norm_``, with the same signature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from runner.gradients.layout import Layout
from runner.gradients.over_ranks import over_ranks, process_groups_of
from runner.gradients.shard import WeakShard, add_up_gradient, is_dtensor
from runner.integrations.clipping import ListClipper

# For the first parameter of a list and the group of its stages, what clips the list.
_clippers = WeakIdKeyDictionary()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: Any = None,
    ep_enabled: bool = False,
) -> Tensor:
    """Clip gradients in place, so that the norm of the whole model is at most ``max_norm``.

    It may replace ``torchtitan.distributed.utils.clip_grad_norm_``. Every rank of the world calls
    it, with its parameters in the same order in each step. The first call, and each one with other
    parameters, takes a few collectives, which compare replicas; later calls take one.

    Args:
        parameters: the parameters of all model parts of this rank. Their DTensor placements say
            which ranks hold what, on any number of meshes; plain tensors are replicas.
        max_norm: λ, above 0.
        norm_type: p of the total norm; ``math.inf`` for the largest element.
        error_if_nonfinite: raise if the norm is NaN or infinite. Otherwise such gradients are left
            as they are.
        foreach: not used; there is one implementation.
        pp_mesh: mesh of one dimension over the pipeline stages, which hold different parameters.
        ep_enabled: not used: the placements of experts are enough.

    Returns:
        The norm before clipping, a plain 0-dimensional tensor, the same on every rank.

    Raises:
        RuntimeError: with ``error_if_nonfinite``, a norm that is not finite, on every rank.
        ValueError: no parameters; or replicas differ (``LayoutError``, on every rank).
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not listed:
        raise ValueError("no parameters to clip: was a generator of parameters used before?")
    clipper = _clipper_of(listed, pp_mesh)
    options = {"threshold": max_norm, "norm_type": float(norm_type)}
    mode = clipper.calls.mode("norm", options, clipper.layout)
    norm = clipper.clip(mode).norm
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} is {float(norm)}, so it cannot be clipped: "
            "error_if_nonfinite=False leaves such gradients as they are"
        )
    return norm


def _clipper_of(parameters: list[Tensor], pp_mesh: Any) -> ListClipper:
    """Return what clips a list of parameters; a new one if they have changed."""
    groups = {} if pp_mesh is None else process_groups_of({"*": pp_mesh})
    mark: list[Any] = [groups.get("*")]
    for parameter in parameters:
        mark += [parameter.shape, parameter.requires_grad]
        if is_dtensor(parameter):
            add_up_gradient(parameter)
            mark += [parameter.placements, parameter.device_mesh]
    clipper: ListClipper | None = _clippers.get(parameters[0])  # type: ignore[no-untyped-call]
    if clipper is not None and clipper.is_of(parameters) and clipper.mark == mark:
        return clipper
    layout = _layout_of(parameters, groups)
    references = [TensorWeakRef(parameter) for parameter in parameters]
    clipper = ListClipper(layout, mark=mark, parameters=references)
    _clippers[parameters[0]] = clipper
    return clipper


def _layout_of(parameters: list[Tensor], groups: dict[str, Any]) -> Layout:
    """Return the layout of parameters, which it does not keep alive."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Layout.of_parameters([*parameters], WeakShard)
    assert dist.group.WORLD is not None
    numbered = nn.ParameterList(parameters)
    layout = over_ranks(numbered, dist.group.WORLD, groups)
    weak = []
    for shard in layout.shards:
        weak_shard = WeakShard(
            shard.name,
            shard.param,
            shard.units,
            shard.num_replicas,
            shard.shard_groups,
            shard.base,
        )
        weak.append(weak_shard)
    return Layout(weak, layout.group, (), layout.parameters, layout.device.type)
