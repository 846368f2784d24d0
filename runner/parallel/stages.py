"""Split a model into pipeline stages, assign stages to ranks, and keep those of this rank.

README.md says which models can be split. A part of one of transformers runs the forward pass of the
model in which the modules of all other parts return their input, so that masks and position
embeddings are those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.config.notation import first_few
from runner.config.plugin_section import SCHEDULES
from runner.parallel.hooks import carry_over, require_no_post_accumulate


class CutError(ValueError):
    """A model cannot be split into stages as asked."""


class Part(NamedTuple):
    modules: tuple[str, ...]  # qualified names
    run: Callable[[Tensor], Tensor]


class Stage(nn.Module):
    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = [part.run for part in parts]
        names = [name for part in parts for name in part.modules]
        self.held = nn.ModuleList(model.get_submodule(name) for name in names)
        self.dtype: torch.dtype | None = None  # of autocast
        self.ends = False  # whether this is the last stage, whose outputs are in full precision

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device.type
        with torch.autocast(device, self.dtype) if self.dtype is not None else nullcontext():
            for part in self.parts:
                hidden = part(hidden)
        half = hidden.dtype in (torch.float16, torch.bfloat16)
        return hidden.float() if self.ends and half else hidden


def parts_of(model: nn.Module) -> list[Part]:
    listed = getattr(model, "pipeline", None)
    if callable(listed):
        return [Part(tuple(modules), run) for modules, run in listed()]
    if type(model).forward is nn.Sequential.forward:
        # named_children() would list a module that is there twice only once.
        held = model._modules.items()
        return [Part((name,), module) for name, module in held if module is not None]
    why = "give it a method pipeline() that lists its parts"
    try:
        if found := planned_parts(model):
            return found
    except Exception as error:  # of the model's own forward
        why += f" ({' '.join(str(error).split())[:200]})"
    raise CutError(f"{type(model).__name__} cannot be cut into stages: {why}")


class _Skipped(nn.Module):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def planned_parts(model: nn.Module) -> list[Part]:
    """Return the parts of a model of transformers in order; none if it has no such plan."""
    planned = {*(getattr(model, "_pp_plan", None) or {})}
    names = [name for name, _ in model.named_modules() if name in planned]
    lists = [name for name in names if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        return []
    start = names.index(lists[0])
    before, after = names[:start], names[start + 1 :]
    layers = [f"{lists[0]}.{i}" for i, _ in model.get_submodule(lists[0]).named_children()]
    everything = [*before, *layers, *after]
    if not before or not after:
        return []
    inside: Any = model.base_model
    _require_nothing_between(model, inside, everything)

    def enter(tokens: Tensor) -> Tensor:
        with _skipping(model, [*layers, *after]):
            return _hidden(inside(input_ids=tokens, use_cache=False))

    def pass_on(layer: str, hidden: Tensor) -> Tensor:
        with _skipping(model, [name for name in everything if name != layer]):
            return _hidden(inside(inputs_embeds=hidden, use_cache=False))

    def leave(hidden: Tensor) -> Tensor:
        with _skipping(model, [*before, *layers]):
            outputs: Any = model(inputs_embeds=hidden, use_cache=False)
            logits: Tensor | None = getattr(outputs, "logits", None)
            return _hidden(outputs) if logits is None else logits

    inner = [Part((name,), partial(pass_on, name)) for name in layers]
    return [Part(tuple(before), enter), *inner, Part(tuple(after), leave)]


def _hidden(outputs: Any) -> Tensor:
    hidden: Tensor = outputs.last_hidden_state
    return hidden


@contextmanager
def _skipping(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let the modules called ``names`` return their input."""
    skipped = _Skipped()
    places = []
    for name in names:
        owner, _, key = name.rpartition(".")
        modules = model.get_submodule(owner)._modules
        places.append((modules, key, modules[key]))
    try:
        for modules, key, _ in places:
            modules[key] = skipped
        yield
    finally:
        for modules, key, module in places:
            modules[key] = module


@torch.no_grad()
def _require_nothing_between(model: nn.Module, inside: nn.Module, names: Sequence[str]) -> None:
    """Refuse a model that changes hidden states outside of the modules of its plan."""
    weight = inside.get_input_embeddings().weight  # type: ignore[operator]
    if weight.is_meta:
        return
    hidden = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    hidden = hidden.view(1, 2, -1)
    with _skipping(model, names):
        if not torch.equal(_hidden(inside(inputs_embeds=hidden, use_cache=False)), hidden):
            raise ValueError("its forward computes between the modules of its plan for pipelines")


def cut(model: nn.Module, stages: int, starts: Sequence[str] | None = None) -> list[list[Part]]:
    """Return the parts of each stage, in order."""
    parts, kind = parts_of(model), type(model).__name__
    held = {id(parameter) for _, parameter in _parameters(model, parts)}
    if loose := [name for name, p in model.named_parameters() if id(p) not in held]:
        raise CutError(
            f"{kind} cannot be cut into stages: {first_few(loose, 3)} is in no module of a part, "
            "so no stage would hold it: move it into a module, and let the part of pipeline() that "
            "uses it name that module"
        )
    if stages > len(parts):
        raise CutError(
            f"{stages} stages, but {kind} has only {len(parts)} parts to cut between: choose a "
            "smaller pp_size, or a schedule with one stage a rank"
        )
    bounds = _balanced(model, parts, stages) if starts is None else _named(parts, stages, starts)
    return [parts[a:b] for a, b in zip([0, *bounds], [*bounds, len(parts)], strict=True)]


def _named(parts: Sequence[Part], stages: int, starts: Sequence[str]) -> list[int]:
    listed = [part.modules[0] for part in parts]
    bounds = [listed.index(name) for name in starts if name in listed]
    if len(starts) != stages - 1 or len(bounds) < len(starts) or sorted({0, *bounds})[1:] != bounds:
        raise CutError(
            f"{', '.join(starts)} cannot be the starts of {stages} stages: name {stages - 1} of "
            f"{', '.join(listed[1:])}, in this order"
        )
    return bounds


def _balanced(model: nn.Module, parts: Sequence[Part], stages: int) -> list[int]:
    """Return the starts of the stages that minimise the parameters of the largest stage."""
    costs = [1 + sum(p.numel() for _, p in _parameters(model, [part])) for part in parts]
    sums = [0, *accumulate(costs)]

    @cache
    def best(count: int, end: int) -> tuple[int, list[int]]:
        """Return the size of the largest of ``count`` stages, and the starts of all but one."""
        if count == 1:
            return sums[end], []
        last = range(count - 1, end)
        largest, start = min((max(best(count - 1, j)[0], sums[end] - sums[j]), j) for j in last)
        return largest, [*best(count - 1, start)[1], start]

    return best(stages, len(parts))[1]


def stages_on(rank: int, ranks: int, schedule: str) -> list[int]:
    if schedule == "zero_bubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(SCHEDULES[schedule].stages_per_rank)]


def stage_to_rank(stage: int, ranks: int, schedule: str) -> int:
    return next(rank for rank in range(ranks) if stage in stages_on(rank, ranks, schedule))


def _modules(model: nn.Module, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for name in part.modules:
            yield name, model.get_submodule(name)


def _parameters(model: nn.Module, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in _modules(model, parts):
        yield from module.named_parameters(prefix=prefix)


class OwnStages(NamedTuple):
    """The stages of this rank, and the copies of parameters that splitting the model made."""

    numbers: list[int]
    renamed: dict[str, str]  # name in the whole model of each parameter used under another name
    copies: dict[str, list[int]]  # by name, pipeline rank of each copy that several stages use


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
    copies = copies_of(model, stages, renamed, homes, sharded=sharded)
    own = stages_on(rank, ranks, schedule)
    keep(model, stages, own)
    return OwnStages(own, renamed, copies)


def untie(model: nn.Module, stages: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Give each stage its own copy of a parameter that several use, except in a module that they
    share; return new names.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    renamed: dict[str, str] = {}
    users: dict[nn.Module, set[int]] = {}
    for number, parts in enumerate(stages):
        for prefix, planned in _modules(model, parts):
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
        joined: list[set[int]] = []  # the stages that share a module with each other
        for module, _ in held:
            touched = [numbers for numbers in joined if numbers & users[module]]
            apart = [numbers for numbers in joined if not numbers & users[module]]
            joined = [*apart, users[module].union(*touched)]
        for others in sorted(joined, key=min)[1:]:
            named = [(names[id(parameter)], parameter)]
            require_no_post_accumulate(named, "several stages have a copy of this parameter each")
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            carry_over(parameter._backward_hooks, copy)
            for module, key in held:
                if users[module] <= others:
                    module._parameters[key] = copy
    return renamed


def copies_of(
    model: nn.Module,
    stages: Sequence[Sequence[Part]],
    renamed: Mapping[str, str],
    homes: Sequence[int],
    *,
    sharded: bool = False,
) -> dict[str, list[int]]:
    """Return the pipeline rank of each copy of a parameter that has several, by its name.

    ``homes``: the pipeline rank of each stage. Those that are ``sharded`` must not share a module.
    """
    copies: dict[str, dict[tuple[int, int], int]] = {}
    for number, (home, parts) in enumerate(zip(homes, stages, strict=True)):
        for own, parameter in _parameters(model, parts):
            users = copies.setdefault(renamed.get(own, own), {})
            first = users.setdefault((home, id(parameter)), number)
            if sharded and first != number:
                raise CutError(
                    f"{own} is in a module that stages {first} and {number} of one rank use, and "
                    "cannot be sharded: choose a schedule with one stage a rank, or zero_stage=1"
                )
    return {
        name: sorted(home for home, _ in users) for name, users in copies.items() if len(users) > 1
    }


def keep(model: nn.Module, stages: Sequence[Sequence[Part]], own: Sequence[int]) -> None:
    """Drop the parameters and buffers of ``model`` that only stages other than ``own`` use."""
    used = [
        {
            id(tensor)
            for _, module in _modules(model, parts)
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
