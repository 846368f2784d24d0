"""Split a model into pipeline stages, assign stages to ranks, and keep this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.config.notation import first_few
from runner.parallel.hooks import carry_over, require_no_post_accumulate


class Schedule(NamedTuple):
    """A schedule of torch for the passes of a pipeline."""

    kind: str  # class of torch.distributed.pipelining
    stages_per_rank: int
    fills_every_stage: bool
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule("ScheduleGPipe", 1, fills_every_stage=False),
    "1f1b": Schedule("Schedule1F1B", 1, fills_every_stage=True),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, fills_every_stage=True),
    "zero_bubble": Schedule("ScheduleZBVZeroBubble", 2, False, splits_backward=True),
}


def refused_microbatches(schedule: str, pp_size: int, microbatches: int) -> str | None:
    """Return why ``microbatches`` do not fill the pipeline; None if they do."""
    stages = pp_size * SCHEDULES[schedule].stages_per_rank
    if SCHEDULES[schedule].fills_every_stage and microbatches < stages:
        return f"must be {stages} or more, one for each stage, or schedule=gpipe"
    if schedule == "interleaved_1f1b" and microbatches % (microbatches // pp_size):
        return f"must make equal rounds over {pp_size} ranks: give a multiple of {pp_size}"
    return None


class CutError(ValueError):
    """A model cannot be split into stages as asked."""


class Part(NamedTuple):
    """A part of a model: its modules by name, and the function that runs them."""

    modules: tuple[str, ...]  # qualified names
    run: Callable[[Tensor], Tensor]


class Stage(nn.Module):
    """Consecutive parts of a model, which one rank runs."""

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
        return full_precision(hidden) if self.ends else hidden


def full_precision(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision in float32; others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def parts_of(model: nn.Module) -> list[Part]:
    """Return the parts that a model can be cut into, in their order.

    Raises:
        CutError: the model has no method ``pipeline``, or one that lists no parts, and is no
            ``Sequential``.
    """
    listed = getattr(model, "pipeline", None)
    if callable(listed):
        names = {module: name for name, module in model.named_modules()}
        return [_part(item, names, type(model).__name__) for item in listed()]
    if type(model).forward is nn.Sequential.forward:
        # named_children() would list a module that is there twice only once.
        children = model._modules.items()
        return [Part((name,), module) for name, module in children if module is not None]
    raise CutError(
        f"{type(model).__name__} cannot be cut into stages: give it a method pipeline() that lists "
        "its parts"
    )


def _part(item: Any, names: Mapping[nn.Module, str], kind: str) -> Part:
    """Return a part of a model of class ``kind``, whose modules have ``names``."""
    if isinstance(item, nn.Module) and item in names:
        return Part((names[item],), item)
    match item:
        case (list() | tuple() as modules, run) if callable(run):
            unknown = [name for name in modules if name not in names.values()]
            if not unknown:
                return Part(tuple(modules), run)
            raise CutError(f"{kind}.pipeline() names {unknown[0]}, and {kind} has no such module")
    raise CutError(
        f"{kind}.pipeline() lists {type(item).__name__}: each part is a module of {kind}, or a "
        "pair of the names of the modules that it uses, in a list, and the function that runs it"
    )


def cut(model: nn.Module, stages: int, starts: Sequence[str] | None = None) -> list[list[Part]]:
    """Return the parts of each stage, in order."""
    parts = parts_of(model)
    kind = type(model).__name__
    in_parts = {id(parameter) for _, parameter in _parameters(model, parts)}
    loose = [name for name, p in model.named_parameters() if id(p) not in in_parts]
    if loose:
        raise CutError(
            f"{kind} cannot be cut into stages: {first_few(loose, 3)} is in no module of a part: "
            "move it into a module that the part of pipeline() that uses it names"
        )
    if stages > len(parts):
        raise CutError(
            f"{stages} stages, but {kind} has only {len(parts)} parts to cut between: choose a "
            "smaller pp_size, or a schedule with one stage a rank"
        )
    bounds = _balanced(model, parts, stages) if starts is None else _named(parts, stages, starts)
    by_stage = [parts[a:b] for a, b in zip([0, *bounds], [*bounds, len(parts)], strict=True)]
    homes: dict[nn.Module, int] = {}
    for number, stage in enumerate(by_stage):
        for name, module in _inside(model, stage):
            named = next(module.named_parameters(recurse=False), None)
            if named and homes.setdefault(module, number) != number:
                raise CutError(
                    f"{name} has parameters, and stages {homes[module]} and {number} both use it: "
                    "let one stage use it, or share parameters of several modules"
                )
    return by_stage


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
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

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
    """Return the stages on a rank of a pipeline, in their order."""
    if schedule == "zero_bubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(SCHEDULES[schedule].stages_per_rank)]


def stage_to_rank(stage: int, ranks: int, schedule: str) -> int:
    """Return the rank of a pipeline that has a stage."""
    return next(rank for rank in range(ranks) if stage in stages_on(rank, ranks, schedule))


def _inside(model: nn.Module, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for name in part.modules:
            yield from model.get_submodule(name).named_modules(prefix=name)


def _parameters(model: nn.Module, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in _inside(model, parts):
        yield from module.named_parameters(prefix=path, recurse=False)


class OwnStages(NamedTuple):
    """The stages of this rank, and the copies of parameters that splitting the model made."""

    numbers: list[int]
    renamed: dict[str, str]  # name in the whole model of each parameter used under another name
    copies: dict[str, list[int]]  # by name, pipeline rank of each copy that several stages use


def keep_own(
    model: nn.Module, stages: Sequence[Sequence[Part]], rank: int, ranks: int, schedule: str
) -> OwnStages:
    """Reduce ``model`` to the stages of this rank, in place."""
    renamed, users = untie(model, stages)
    numbers_here = stages_on(rank, ranks, schedule) if stages else []
    keep(model, stages, numbers_here)
    copies = {
        name: sorted(stage_to_rank(number, ranks, schedule) for number in numbers)
        for name, numbers in users.items()
        if len(numbers) > 1
    }
    return OwnStages(numbers_here, renamed, copies)


def untie(
    model: nn.Module, stages: Sequence[Sequence[Part]]
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Give each stage its own copy of a parameter; return new names, and the stages of each.

    Copies have no values.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    renamed: dict[str, str] = {}
    copies_of: dict[str, dict[int, nn.Parameter]] = {}  # by name and stage
    for number, parts in enumerate(stages):
        for path, module in _inside(model, parts):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = names[parameter]
                copies = copies_of.setdefault(name, {})
                if not copies:
                    copies[number] = parameter
                elif number not in copies:
                    why = "several stages have a copy of this parameter each"
                    require_no_post_accumulate([(name, parameter)], why)
                    copy = nn.Parameter(
                        torch.empty_like(parameter.detach()), parameter.requires_grad
                    )
                    carry_over(parameter._backward_hooks, copy)
                    copies[number] = copy
                    names[copy] = name
                module._parameters[key] = copies[number]
                if name != f"{path}.{key}":
                    renamed[f"{path}.{key}"] = name
    return renamed, {name: [*copies] for name, copies in copies_of.items()}


def keep(model: nn.Module, stages: Sequence[Sequence[Part]], kept: Sequence[int]) -> None:
    """Drop the parameters and buffers of ``model`` that no stage of ``kept`` uses."""
    used_here: set[int] = set()
    used_elsewhere: set[int] = set()
    for number, parts in enumerate(stages):
        used = used_here if number in kept else used_elsewhere
        for _, module in _inside(model, parts):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                used.add(id(tensor))
    dropped = used_elsewhere - used_here
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) in dropped:
                    tensors[key] = None
