"""The parts of a model that lie on this rank, and what it tells other ranks of them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from runner.check.samples import Samples
from runner.gradients.over_ranks import process_groups_of
from runner.gradients.shard import is_dtensor, local, position_of
from runner.gradients.units import owned_parameters

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",
}


@dataclass(eq=False, slots=True)
class Part:
    """What lies of one parameter on this rank."""

    name: str
    key: str  # the name, or another one that tells apart parameters of one name on other ranks
    parameter: nn.Parameter
    module: nn.Module
    position: tuple[int, ...]  # of the shard along the mesh axes that split the parameter
    pattern: str | None  # the pattern of ``groups`` that the parameter matches
    before: Tensor | None = None  # copy of the local gradient
    power: float = 0.0  # Σ|g|^p of it
    after: Tensor | None = None

    @property
    def gradient(self) -> Tensor | None:
        """Local shard of the gradient; None if there is none."""
        gradient = self.parameter.grad
        return None if gradient is None else local(gradient)


class Facts(NamedTuple):
    """What a rank tells all others of a part, before the clipping."""

    name: str
    key: str
    position: tuple[int, ...]
    pattern: str | None
    trained: bool
    shape: tuple[int, ...]
    elements: int  # of the local shard
    dtype: str  # of the gradient
    has_gradient: bool
    partial: str  # placements of a gradient whose ranks have not added it up
    embeds: bool
    power: float
    weight: tuple[float, ...]
    gradient: tuple[float, ...]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.power)


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers, whose parameters have the names of the user's own.

    Raises:
        TypeError: it is not a module, or FSDP 1 wraps it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: give the module whose gradients are clipped "
            "(several of them as nn.ModuleList)"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise TypeError(
            "this model is wrapped by FSDP 1 (FullyShardedDataParallel), whose flat parameters do "
            "not say which parameter is where: use fully_shard (FSDP 2)"
        )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    for name, attribute in _WRAPPERS.items():
        if name in kinds:
            return inner_model(getattr(model, attribute))
    return model


def parts_of(model: nn.Module, groups: Mapping[str, Any] | None) -> tuple[list[Part], list[str]]:
    """Return the parts of a model on this rank, and what is wrong with ``groups``."""
    process_groups = process_groups_of(groups)
    parts: dict[int, Part] = {}  # by the parameter: a tied one counts once
    problems: list[str] = []
    for name, parameter, module in owned_parameters(model):
        if id(parameter) in parts:
            continue
        position, _ = position_of(parameter)
        part = Part(name, name, parameter, module, position, _pattern(name, process_groups))
        parts[id(parameter)] = part
        if part.pattern is None:
            continue
        group = process_groups[part.pattern]
        if hasattr(group, "rank") and group.rank() >= 0:
            part.key = f"{name}@{group.rank()}"
        else:
            problems.append(f"{name} lies on a rank outside of the group of {part.pattern!r}")
    return list(parts.values()), problems


def _pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first glob that a parameter's name matches."""
    for pattern in patterns:
        if fnmatch.fnmatchcase(name, pattern):
            return pattern
    return None


def facts_of(parts: list[Part], ranks: int) -> list[Facts]:
    """Return what this rank tells others of its parts; the host waits once.

    A single rank has no others whose samples it could compare with its own.
    """
    weights: list[Any] = [()] * len(parts)
    gradients = weights
    if ranks > 1:
        weights = Samples([local(part.parameter.detach()) for part in parts]).projections()
        gradients = Samples([part.before for part in parts]).projections()
    return [
        _facts_of(part, tuple(weight), tuple(gradient), ranks > 1 and _embeds(part))
        for part, weight, gradient in zip(parts, weights, gradients, strict=True)
    ]


def _facts_of(
    part: Part, weight: tuple[float, ...], gradient: tuple[float, ...], embeds: bool
) -> Facts:
    before = part.before
    parameter = part.parameter
    return Facts(
        name=part.name,
        key=part.key,
        position=part.position,
        pattern=part.pattern,
        trained=parameter.requires_grad,
        shape=tuple(parameter.shape),
        elements=local(parameter).numel(),
        dtype=_name_of_type(parameter.dtype if before is None else before.dtype),
        has_gradient=before is not None,
        partial=_partial_placements(parameter.grad),
        embeds=embeds,
        power=part.power,
        weight=weight,
        gradient=gradient,
    )


_name_of_type = lru_cache(str)  # str() of a type takes longer than the rest of a part


def _partial_placements(gradient: Tensor | None) -> str:
    """Return the placements of a DTensor that ranks have not added up, else an empty text."""
    if gradient is None or not is_dtensor(gradient):
        return ""
    placements = gradient.placements
    if not any(placement.is_partial() for placement in placements):
        return ""
    return str(tuple(placements))


def _embeds(part: Part) -> bool:
    if part.parameter.ndim != 2:
        return False
    kind = type(part.module).__name__
    return "embed" in f"{kind} {part.name}".lower()
