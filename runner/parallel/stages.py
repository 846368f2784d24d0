"""How a model is cut into the stages of a pipeline, and which rank has which.

A model that can be cut is a chain: it has a method ``pipeline()`` that lists its parts, each with
the names of the modules it uses and what it does to the one tensor that goes through; or it is a
:class:`torch.nn.Sequential`. Every rank keeps the parameters of its own stages alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from runner.config.schedules import SCHEDULES
from runner.parallel.hooks import carry_over, gradient_hooks, require_no_post_accumulate


class CutError(ValueError):
    """A model cannot be cut into stages as asked."""


@dataclass(frozen=True)
class Part:
    """One link of the chain.

    Attributes:
        modules: qualified names of the modules it uses.
        run: what it does.
    """

    modules: tuple[str, ...]
    run: Callable[[Tensor], Tensor]


def parts_of(model: nn.Module) -> list[Part]:
    """The chain that ``model`` is.

    Raises:
        CutError: it is none.
    """
    listed = getattr(model, "pipeline", None)
    if callable(listed):
        return [Part(tuple(modules), run) for modules, run in listed()]
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise CutError(
                f"{type(model).__name__} cannot be cut into stages: it is a torch.nn.Sequential "
                "with a forward of its own, so give it a method pipeline() that lists its parts"
            )
        # Not its named children: a module that is there twice runs twice.
        return [
            Part((name,), module) for name, module in model._modules.items() if module is not None
        ]
    raise CutError(
        f"{type(model).__name__} cannot be cut into stages: it is no torch.nn.Sequential and has "
        "no method pipeline() that lists its parts"
    )


def cut(model: nn.Module, stages: int, starts: Sequence[str] | None = None) -> list[list[Part]]:
    """The parts of each stage, in order.

    Args:
        model: the whole model.
        stages: how many.
        starts: names of the modules with which the second and each further stage begins; by default
            the stages have about as many parameters each.

    Raises:
        CutError: there are fewer parts than stages, a parameter is in no part, or a name is none
            of a part's.
    """
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
    modules = [model.get_submodule(name) for part in parts for name in part.modules]
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    loose = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if loose:
        more = f" and {len(loose) - 3} more" if len(loose) > 3 else ""
        raise CutError(
            f"{type(model).__name__} cannot be cut into stages: {', '.join(loose[:3])}{more} is in "
            "no module of a part, so no stage would hold it: move it into a module, and let the "
            "part of pipeline() that uses it name that module"
        )


def _named(parts: Sequence[Part], stages: int, starts: Sequence[str]) -> list[int]:
    if len(starts) != stages - 1:
        raise CutError(f"{stages} stages have {stages - 1} cuts, but {len(starts)} names are given")
    first = {part.modules[0]: i for i, part in enumerate(parts)}
    unknown = [name for name in starts if name not in first]
    if unknown:
        raise CutError(
            f"no part begins with {', '.join(unknown)}; parts begin with {', '.join(first)}"
        )
    bounds = [first[name] for name in starts]
    if bounds != sorted(set(bounds)) or 0 in bounds:
        raise CutError(f"{', '.join(starts)} are not in the order of the model: {', '.join(first)}")
    return bounds


def _balanced(model: nn.Module, parts: Sequence[Part], stages: int) -> list[int]:
    """Cuts for which the largest stage is smallest, counted in parameters."""
    costs = [
        1 + sum(p.numel() for name in part.modules for p in model.get_submodule(name).parameters())
        for part in parts
    ]
    n = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][i]: the largest of k stages that hold the first i parts, and where the last begins.
    best = [[(float(sums[i]), 0) for i in range(n + 1)]]
    for k in range(2, stages + 1):
        row = [(float("inf"), 0)] * (n + 1)
        for i in range(k, n + 1):
            row[i] = min((max(best[-1][j][0], sums[i] - sums[j]), j) for j in range(k - 1, i))
        best.append(row)
    bounds, end = [], n
    for row in reversed(best[1:]):
        end = row[end][1]
        bounds.append(end)
    return bounds[::-1]


def stages_on(rank: int, ranks: int, schedule: str) -> list[int]:
    """Which stages a rank of the pipeline holds, in order."""
    if schedule == "zero_bubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(SCHEDULES[schedule].stages_per_rank)]


def stage_to_rank(stage: int, ranks: int, schedule: str) -> int:
    """The rank of the pipeline that holds a stage."""
    return next(rank for rank in range(ranks) if stage in stages_on(rank, ranks, schedule))


def untie(model: nn.Module, stages: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Give each stage its own copy of a parameter that several stages use.

    A module that several stages use has one set of parameters: these stages have one copy.

    Args:
        model: the whole model; its modules get copies in place.
        stages: from :func:`cut`.

    Returns:
        The parameter's name in the whole model, by each other name that it or a copy of it has.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    renamed: dict[str, str] = {}
    users: dict[nn.Module, set[int]] = {}
    for number, parts in enumerate(stages):
        for prefix in (name for part in parts for name in part.modules):
            for path, module in model.get_submodule(prefix).named_modules(prefix=prefix):
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
            if (hooks := gradient_hooks(parameter)) is not None:
                carry_over(hooks, copy)
            for module, key in held:
                if users[module] <= others:
                    module._parameters[key] = copy
    return renamed


def _joined(sets: Iterable[set[int]]) -> list[set[int]]:
    """Sets that have a number in common made one, by their smallest number."""
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
    """Where the copies of a parameter are, by its name, for those that have several.

    Args:
        model: after :func:`untie`, before :func:`keep`.
        stages: from :func:`cut`.
        renamed: from :func:`untie`.
        homes: the rank of the pipeline that holds each stage.

    Returns:
        The rank of the pipeline for each copy.
    """
    copies: dict[str, set[tuple[int, int]]] = {}
    for home, parts in zip(homes, stages, strict=True):
        for prefix in (name for part in parts for name in part.modules):
            for own, parameter in model.get_submodule(prefix).named_parameters(prefix=prefix):
                copies.setdefault(renamed.get(own, own), set()).add((home, id(parameter)))
    return {
        name: sorted(home for home, _ in found) for name, found in copies.items() if len(found) > 1
    }


def require_apart(model: nn.Module, stages: Sequence[Sequence[Part]], homes: Sequence[int]) -> None:
    """Refuse stages on one rank that use the same module: each of them is sharded by itself.

    Args:
        model: after :func:`untie`, before :func:`keep`.
        stages: from :func:`cut`.
        homes: the rank of the pipeline that holds each stage.

    Raises:
        CutError: there are such stages; the message names a parameter.
    """
    users: dict[tuple[int, int], int] = {}
    for number, (home, parts) in enumerate(zip(homes, stages, strict=True)):
        for prefix in (name for part in parts for name in part.modules):
            for own, parameter in model.get_submodule(prefix).named_parameters(prefix=prefix):
                first = users.setdefault((home, id(parameter)), number)
                if first != number:
                    raise CutError(
                        f"{own} is in a module that stages {first} and {number} of one rank use, "
                        "and cannot be sharded: choose a schedule with one stage a rank, or "
                        "zero_stage=1"
                    )


def keep(model: nn.Module, stages: Sequence[Sequence[Part]], own: Sequence[int]) -> None:
    """Drop from ``model`` the parameters and buffers that only other stages use.

    Args:
        model: the whole model.
        stages: from :func:`cut`.
        own: numbers of the stages to keep.
    """
    used: list[set[int]] = []
    for parts in stages:
        modules = [model.get_submodule(name) for part in parts for name in part.modules]
        used.append({id(t) for m in modules for t in (*m.parameters(), *m.buffers())})
    mine = set().union(*(used[number] for number in own))
    others = set().union(*used) - mine
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) in others:
                    tensors[key] = None
