"""Split a model into pipeline stages, and assign stages to ranks.

A model that can be split has a method ``pipeline()`` that lists its parts: for each part the names
of its modules, and a function of one tensor. Or it is a :class:`torch.nn.Sequential`, or a model of
transformers with a plan for pipelines (:mod:`runner.parallel.planned_parts`), or a model that
``torch.fx`` traces (:mod:`runner.parallel.traced_parts`). Every rank keeps only the parameters of
its own stages (:mod:`runner.parallel.own_stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from runner.config.notation import first_few
from runner.config.schedules import SCHEDULES
from runner.parallel.planned_parts import planned_parts
from runner.parallel.traced_parts import traced_parts


class CutError(ValueError):
    """A model cannot be split into stages as asked."""


@dataclass(frozen=True)
class Part:
    """One part of a model, which is not split further.

    Attributes:
        modules: qualified names of its modules.
        run: function that computes its output from its input.
    """

    modules: tuple[str, ...]
    run: Callable[[Tensor], Tensor]


class Stage(nn.Module):
    """Consecutive parts of a model.

    Attributes:
        dtype: half-precision dtype of autocast, or None.
        ends: whether this is the last stage, whose outputs are in full precision.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = [part.run for part in parts]
        names = [name for part in parts for name in part.modules]
        self.held = nn.ModuleList(model.get_submodule(name) for name in names)
        self.dtype: torch.dtype | None = None
        self.ends = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output of the stage, given inputs of the model or the output before it."""
        device = hidden.device.type
        with torch.autocast(device, self.dtype) if self.dtype is not None else nullcontext():
            for part in self.parts:
                hidden = part(hidden)
        half = hidden.dtype in (torch.float16, torch.bfloat16)
        return hidden.float() if self.ends and half else hidden


def parts_of(model: nn.Module) -> list[Part]:
    """Return the parts of ``model`` in order."""
    listed = getattr(model, "pipeline", None)
    if callable(listed):
        return [Part(tuple(modules), run) for modules, run in listed()]
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise CutError(
                f"{type(model).__name__} cannot be cut into stages: it is a torch.nn.Sequential "
                "with a forward of its own, so give it a method pipeline() that lists its parts"
            )
        # named_children() would list a module that is there twice only once.
        return [
            Part((name,), module) for name, module in model._modules.items() if module is not None
        ]
    try:
        found = planned_parts(model) or traced_parts(model)
    except Exception as error:
        raise CutError(
            f"{type(model).__name__} cannot be cut into stages: it is no torch.nn.Sequential and "
            "has no method pipeline() that lists its parts, and torch.fx cannot trace it "
            f"({' '.join(str(error).split())[:200]})"
        ) from error
    return [Part(modules, run) for modules, run in found]


def cut(model: nn.Module, stages: int, starts: Sequence[str] | None = None) -> list[list[Part]]:
    """Return the parts of each stage, in order."""
    parts = parts_of(model)
    _require_owner(model, parts)
    if stages > len(parts):
        raise CutError(
            f"{stages} stages, but {type(model).__name__} has only {len(parts)} parts to cut "
            "between: choose a smaller pp_size, or a schedule with one stage a rank"
        )
    bounds = _balanced(model, parts, stages) if starts is None else _named(parts, stages, starts)
    return [parts[a:b] for a, b in zip([0, *bounds], [*bounds, len(parts)], strict=True)]


def _require_owner(model: nn.Module, parts: Sequence[Part]) -> None:
    held = {id(parameter) for _, parameter in named_parameters(model, parts)}
    loose = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if loose:
        raise CutError(
            f"{type(model).__name__} cannot be cut into stages: {first_few(loose, 3)} is in "
            "no module of a part, so no stage would hold it: move it into a module, and let the "
            "part of pipeline() that uses it name that module"
        )


def _named(parts: Sequence[Part], stages: int, starts: Sequence[str]) -> list[int]:
    if len(starts) != stages - 1:
        raise CutError(f"{stages} stages have {stages - 1} cuts, but {len(starts)} names are given")
    listed = ", ".join(part.modules[0] for part in parts)
    first: dict[str, int] = {}
    for i, part in enumerate(parts):
        # A part may begin with a module inside of the named one.
        path = part.modules[0].split(".")
        for length in range(len(path), 0, -1):
            first.setdefault(".".join(path[:length]), i)
    unknown = [name for name in starts if name not in first]
    if unknown:
        raise CutError(f"no part begins with {', '.join(unknown)}; parts begin with {listed}")
    bounds = [first[name] for name in starts]
    if bounds != sorted(set(bounds)) or 0 in bounds:
        raise CutError(f"{', '.join(starts)} are not in the order of the model: {listed}")
    return bounds


def _balanced(model: nn.Module, parts: Sequence[Part], stages: int) -> list[int]:
    """Return the starts of the stages that minimise the parameters of the largest stage."""
    costs = [1 + sum(p.numel() for _, p in named_parameters(model, [part])) for part in parts]
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
    """Return the stages that pipeline rank ``rank`` holds, in order."""
    if schedule == "zero_bubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(SCHEDULES[schedule].stages_per_rank)]


def stage_to_rank(stage: int, ranks: int, schedule: str) -> int:
    """Return the pipeline rank that holds ``stage``."""
    return next(rank for rank in range(ranks) if stage in stages_on(rank, ranks, schedule))


def modules_of(model: nn.Module, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of ``parts`` with their qualified names."""
    for part in parts:
        for name in part.modules:
            yield name, model.get_submodule(name)


def named_parameters(model: nn.Module, parts: Iterable[Part]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of ``parts`` with their qualified names."""
    for prefix, module in modules_of(model, parts):
        yield from module.named_parameters(prefix=prefix)
