"""Reduce a model to the pipeline stages of this rank, with a copy of what several stages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torch import nn

from runner.parallel.hooks import carry_over, require_no_post_accumulate
from runner.parallel.stages import (
    CutError,
    Part,
    modules_of,
    named_parameters,
    stage_to_rank,
    stages_on,
)


def untie(model: nn.Module, stages: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Give each stage its own copy of a parameter that several stages use.

    Stages that share a module share the copies of its parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    renamed: dict[str, str] = {}
    users: dict[nn.Module, set[int]] = {}
    for number, parts in enumerate(stages):
        for prefix, planned in modules_of(model, parts):
            for path, module in planned.named_modules(prefix=prefix):
                users.setdefault(module, set()).add(number)
                for key, parameter in module._parameters.items():
                    if parameter is not None and names[id(parameter)] != f"{path}.{key}":
                        renamed[f"{path}.{key}"] = names[id(parameter)]
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in users:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, key))
    for parameter, held in places.items():
        for others in _joined(users[module] for module, _ in held)[1:]:
            named = [(names[id(parameter)], parameter)]
            require_no_post_accumulate(named, "several stages have a copy of this parameter each")
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            carry_over(parameter._backward_hooks, copy)
            for module, key in held:
                if users[module] <= others:
                    module._parameters[key] = copy
    return renamed


def _joined(sets: Iterable[set[int]]) -> list[set[int]]:
    """Return the unions of sets that overlap, sorted by their smallest number."""
    joined: list[set[int]] = []
    for found in sets:
        touched = [numbers for numbers in joined if numbers & found]
        apart = [numbers for numbers in joined if not numbers & found]
        joined = [*apart, found.union(*touched)]
    return sorted(joined, key=min)


def copies_of(
    model: nn.Module,
    stages: Sequence[Sequence[Part]],
    renamed: Mapping[str, str],
    homes: Sequence[int],
) -> dict[str, list[int]]:
    """Return the pipeline rank of each copy of a parameter that has several, by its name.

    Call it after :func:`untie`, with what that returned and the pipeline rank of each stage.
    """
    copies: dict[str, set[tuple[int, int]]] = {}
    for home, parts in zip(homes, stages, strict=True):
        for own, parameter in named_parameters(model, parts):
            copies.setdefault(renamed.get(own, own), set()).add((home, id(parameter)))
    return {
        name: sorted(home for home, _ in found) for name, found in copies.items() if len(found) > 1
    }


def require_apart(model: nn.Module, stages: Sequence[Sequence[Part]], homes: Sequence[int]) -> None:
    """Refuse stages of one rank that share a module, because each stage is sharded by itself."""
    users: dict[tuple[int, int], int] = {}
    for number, (home, parts) in enumerate(zip(homes, stages, strict=True)):
        for own, parameter in named_parameters(model, parts):
            first = users.setdefault((home, id(parameter)), number)
            if first != number:
                raise CutError(
                    f"{own} is in a module that stages {first} and {number} of one rank use, "
                    "and cannot be sharded: choose a schedule with one stage a rank, or "
                    "zero_stage=1"
                )


def keep(model: nn.Module, stages: Sequence[Sequence[Part]], own: Sequence[int]) -> None:
    """Drop the parameters and buffers of ``model`` that only stages other than ``own`` use."""
    used = [
        {
            id(tensor)
            for _, module in modules_of(model, parts)
            for tensor in chain(module.parameters(), module.buffers())
        }
        for parts in stages
    ]
    mine = set().union(*(used[number] for number in own))
    others = set().union(*used) - mine
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) in others:
                    tensors[key] = None


class OwnStages(NamedTuple):
    """The stages of this rank, and the copies of parameters that splitting the model made.

    Attributes:
        numbers: numbers of the stages.
        renamed: names from :func:`untie`.
        copies: pipeline rank of each copy of a parameter that several stages use, by its name.
    """

    numbers: list[int]
    renamed: dict[str, str]
    copies: dict[str, list[int]]


def keep_own(
    model: nn.Module,
    stages: Sequence[Sequence[Part]],
    rank: int,
    ranks: int,
    schedule: str,
    *,
    sharded: bool,
) -> OwnStages:
    """Reduce ``model`` to the stages of this rank, in place."""
    if not stages:
        return OwnStages([], {}, {})
    renamed = untie(model, stages)
    homes = [stage_to_rank(number, ranks, schedule) for number in range(len(stages))]
    if sharded:
        require_apart(model, stages, homes)
    copies = copies_of(model, stages, renamed, homes)
    own = stages_on(rank, ranks, schedule)
    keep(model, stages, own)
    return OwnStages(own, renamed, copies)
