"""Which ranks hold which parameters of a model that no plugin has distributed.

A parameter that is no DTensor counts as a replica on every rank, unless the user says over which
ranks it differs. Ranks compare checksums once, so that experts of each rank are not taken for
replicas of one another.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.config.notation import first_few
from runner.gradients.account import account
from runner.gradients.layout import Layout, OptionError
from runner.gradients.objects import gather_objects
from runner.gradients.shard import (
    LayoutError,
    ParamShard,
    is_dtensor,
    local,
    placed,
    position_of,
)
from runner.gradients.units import head_weights, owned_parameters

ProcessGroups = Mapping[str, Any]
"""For globs of parameter names the process group on each rank of which parameters differ."""

_CHUNK = 2**22  # elements that are summed at a time
_NEAR = 0.05  # share of its norm by which the gradient of a replica may differ
_SAME = 1e-6  # the same for one gradient that was added up over ranks
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EXAMPLE = 'groups={"experts.*": process_group}'


class Held(NamedTuple):
    """What a rank tells all others of a parameter that it holds."""

    name: str
    position: tuple[int, ...]  # of the shard along mesh axes; () for a whole parameter
    base: str  # name in the user's model
    elements: int  # of the whole parameter
    weight: int | None = None  # checksum of the shard; None where it need not be compared
    gradient: tuple[float, ...] | None = None  # see :func:`projections`
    may_be_tied: bool = False  # a matrix that is distinct on each rank, as users say


class Report(NamedTuple):
    """What a rank tells all others of its model."""

    held: list[Held]
    heads: tuple[str, ...]
    matched: dict[str, bool]  # for each pattern, whether a parameter of this rank matches
    problem: str | None  # what is wrong on this rank


def over_ranks(model: nn.Module, world: dist.ProcessGroup, process_groups: ProcessGroups) -> Layout:
    """Return the layout of a model whose parameters lie on all ranks of ``world``.

    DTensors lie as their placements say. Parameters that match a pattern of ``process_groups`` are
    distinct on each rank of the group, and replicas over all other ranks. All others are replicas
    on all ranks. Takes a few collectives of ``world``.

    Raises:
        LayoutError: replicas differ, or a parameter lies on some ranks alone. On every rank.
        OptionError: no parameter on any rank matches a pattern. On every rank.
    """
    shards: list[ParamShard] = []
    held: list[Held] = []
    matched = dict.fromkeys(process_groups, False)
    problem: str | None = None
    seen: set[int] = set()
    for base, parameter, module in owned_parameters(model):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        name = base
        ranks = 1
        pattern = _pattern_of(base, process_groups)
        if pattern is not None:
            matched[pattern] = True
            group = process_groups[pattern]
            if isinstance(group, dist.ProcessGroup):
                ranks = group.size()
                name = f"{base}@{group.rank()}"
            else:
                problem = (
                    f"{base} lies on a rank that is not in the process group of {pattern!r}: give "
                    "a group of all ranks that hold such parameters"
                )
        position, parts = position_of(parameter)
        shard = placed(name, parameter, module, parts)
        shards.append(replace(shard, base=base))
        parameter_here = Held(name, position, base, parameter.numel())
        if pattern is not None and parameter.requires_grad and parameter.ndim > 1:
            parameter_here = parameter_here._replace(may_be_tied=True)
        is_compared = parts * ranks < world.size() or parameter_here.may_be_tied
        if parameter.requires_grad and is_compared:
            parameter_here = _with_checksums(parameter_here, parameter)
        held.append(parameter_here)
    report = Report(held, head_weights(model), matched, problem)
    return _layout_of_reports(shards, report, gather_objects(report, world), world)


def _layout_of_reports(
    shards: Sequence[ParamShard],
    report: Report,
    reports: Sequence[Report],
    world: dist.ProcessGroup,
) -> Layout:
    """Return the layout of this rank's shards, given its report and the reports of all ranks."""
    _require_matches(reports)
    _require_on_every_rank(reports)
    require_replicas([of_rank.held for of_rank in reports])
    _require_untied(reports)
    on_all_ranks = [parameter for of_rank in reports for parameter in of_rank.held]
    holders = Counter((parameter.name, parameter.position) for parameter in on_all_ranks)
    with_replicas = []
    for shard, parameter in zip(shards, report.held, strict=True):
        number = holders[parameter.name, parameter.position]
        with_replicas.append(replace(shard, num_replicas=number))
    whole = {parameter.name: parameter.elements for parameter in on_all_ranks}
    parameters, elsewhere = account(with_replicas, world, whole)
    layout = Layout(with_replicas, world, report.heads, parameters, elsewhere)
    renamed = {parameter.base for parameter in on_all_ranks if parameter.name != parameter.base}
    same_heads = all(of_rank.heads == report.heads for of_rank in reports)
    layout.heads_known = same_heads and not renamed.intersection(report.heads)
    return layout


def compare_replicas(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Check that parameters are the same on all ranks of ``group``; one collective.

    Raises:
        LayoutError: they differ, on every rank.
    """
    parameters = []
    for name, parameter in named:
        parameters.append(_with_checksums(Held(name, (), name, parameter.numel()), parameter))
    require_replicas(gather_objects(parameters, group))


def require_replicas(everywhere: Sequence[Sequence[Held]]) -> None:
    """Check that ranks which hold the same part of a parameter have equal weights and gradients."""
    replicas: defaultdict[tuple[str, tuple[int, ...]], list[Held]] = defaultdict(list)
    for on_rank in everywhere:
        for parameter in on_rank:
            replicas[parameter.name, parameter.position].append(parameter)
    weights: dict[str, None] = {}
    gradients: dict[str, None] = {}
    for (name, _), copies in replicas.items():
        if len({copy.weight for copy in copies}) > 1:
            weights[name] = None
        elif any(not _near(copies[0].gradient, copy.gradient) for copy in copies):
            gradients[name] = None
    if weights:
        raise LayoutError(
            f"{first_few([*weights])}: ranks hold different values, so these are no replicas of "
            f"one parameter: say on which ranks they differ, as in {EXAMPLE}, or broadcast them "
            "from one rank"
        )
    if gradients:
        raise LayoutError(
            f"{first_few([*gradients])}: ranks hold different gradients of what counts as one "
            "parameter: average them over ranks before clipping, or, if each rank has parameters "
            f"of its own, say on which ranks they differ, as in {EXAMPLE}"
        )


def checksum(tensor: Tensor) -> int | None:
    """Return a checksum of the bits of a plain tensor, whatever device and order sums them."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.dtype.itemsize not in _INTEGERS:
        return None
    bits = tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize]).flatten()
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        total += int((part * places).sum())  # integers wrap alike in any order
    return total


def projections(tensor: Tensor | None) -> tuple[float, ...]:
    """Return the norm of a gradient and two projections, which small differences hardly change."""
    if tensor is None or tensor.is_meta or not tensor.numel():
        return (0.0, 0.0, 0.0)
    flat = tensor.flatten()
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.float32)
        angles = torch.arange(start, start + len(part), device=part.device).to(part.dtype)
        square = part.square().sum()
        cosines = (part * angles.cos()).sum()
        sines = (part * angles.sin()).sum()
        sums += torch.stack([square, cosines, sines]).double().cpu()
    of_squares, of_cosines, of_sines = sums.tolist()
    return (math.sqrt(of_squares), of_cosines, of_sines)


def _near(first: tuple[float, ...] | None, second: tuple[float, ...] | None) -> bool:
    if first is None or second is None:
        return first is second
    if not all(math.isfinite(value) for value in (*first, *second)):
        return True  # a step that is skipped
    tolerance = _NEAR * max(first[0], second[0])
    return all(abs(a - b) <= tolerance for a, b in zip(first, second, strict=True))


def _with_checksums(held: Held, parameter: Tensor) -> Held:
    gradient = None if parameter.grad is None else local(parameter.grad)
    dense = gradient is None or gradient.layout is torch.strided
    sums = projections(gradient) if dense else None
    return held._replace(weight=checksum(local(parameter.detach())), gradient=sums)


def _pattern_of(name: str, process_groups: ProcessGroups) -> str | None:
    """Return the first pattern that a parameter matches."""
    for pattern in process_groups:
        if fnmatch.fnmatchcase(name, pattern):
            return pattern
    return None


def _require_matches(reports: Sequence[Report]) -> None:
    for report in reports:
        if report.problem is not None:
            raise LayoutError(report.problem)
    if any(list(report.matched) != list(reports[0].matched) for report in reports):
        raise LayoutError("groups has other patterns on other ranks: give the same ones everywhere")
    for pattern in reports[0].matched:
        if not any(report.matched[pattern] for report in reports):
            raise OptionError("groups", f"groups: {pattern!r} matches no parameter on any rank")


def _require_on_every_rank(reports: Sequence[Report]) -> None:
    """Check that each parameter that matches no pattern lies on all ranks."""
    names: list[set[str]] = []
    for report in reports:
        names.append({held.name for held in report.held if held.name == held.base})
    missing = sorted(set[str]().union(*names) - set[str].intersection(*names))
    if missing:
        raise LayoutError(
            f"{first_few(missing)}: some ranks hold no such parameter: say on which ranks "
            f"parameters differ, as in {EXAMPLE}; for pipeline stages of your own that is "
            'groups={"*": process_group_of_stages}'
        )


def _require_untied(reports: Sequence[Report]) -> None:
    """Refuse matrices of a group that are one: equal weights and gradients on several ranks.

    Such is an embedding that the first and the last stage of a pipeline share.
    """
    alike: defaultdict[tuple[Any, ...], dict[str, tuple[int, Held]]] = defaultdict(dict)
    for rank, report in enumerate(reports):
        for held in report.held:
            if held.may_be_tied and held.weight is not None and held.gradient is not None:
                key = (held.elements, held.position, held.weight)
                alike[key].setdefault(held.name, (rank, held))
    for parameters in alike.values():
        (rank, first), *copies = parameters.values()
        for other_rank, copy in copies:
            if _equal(first.gradient, copy.gradient):
                raise LayoutError(
                    f"{first.base} on rank {rank} and {copy.base} on rank {other_rank} have equal "
                    "weights and gradients: a parameter that stages share counts once, so give it "
                    "one name on all ranks that no pattern of groups matches, as in "
                    'groups={"stage.*": process_group_of_stages}'
                )


def _equal(first: tuple[float, ...] | None, second: tuple[float, ...] | None) -> bool:
    """Return whether projections are those of one gradient that is not zero."""
    if first is None or second is None or not 0 < first[0] < math.inf:
        return False
    return all(abs(a - b) <= _SAME * first[0] for a, b in zip(first, second, strict=True))


def process_groups_of(groups: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return process groups by pattern, given groups or one-dimensional device meshes."""
    process_groups: dict[str, Any] = {}
    for pattern, group in (groups or {}).items():
        process_groups[pattern] = group.get_group() if hasattr(group, "get_group") else group
    return process_groups


def require_process_groups(groups: Any) -> None:
    """Check that ``groups`` maps patterns to process groups; options of a mode are checked later.

    Raises:
        OptionError: it does not.
    """
    for pattern, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) or are_process_groups({pattern: group}):
            continue
        raise OptionError(
            "groups",
            f"groups has {group!r} for {pattern!r}, which is a {type(group).__name__}: give a "
            "process group (torch.distributed.group.WORLD, or one of new_group) or a device mesh "
            f"of one dimension, as in {EXAMPLE}",
        )


def without_gradient(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters that are no DTensors and have no gradient yet."""
    plain = [parameter for parameter in model.parameters() if not is_dtensor(parameter)]
    return [parameter for parameter in plain if parameter.requires_grad and parameter.grad is None]


def on_some_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    """Return whether ``flag`` is true on a rank of ``group``; a collective."""
    return any(gather_objects(flag, group))


def are_process_groups(groups: Any) -> bool:
    """Return whether ``groups`` maps patterns to process groups, not to clipping modes."""
    if not isinstance(groups, Mapping) or not groups or not dist.is_available():
        return False
    outside = dist.GroupMember.NON_GROUP_MEMBER
    return all(
        isinstance(group, dist.ProcessGroup) or hasattr(group, "get_group") or group is outside
        for group in groups.values()
    )


def outside_of_ddp(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], Any]:
    """Return trained parameters that no DistributedDataParallel inside of ``model`` averages.

    The second value is the process group of the first such module, None if there is none.
    """
    modules = [*_ddp_modules(model)]
    if not modules:
        return [], None
    averaged: set[int] = set()
    for ddp in modules:
        for name, parameter in ddp.module.named_parameters():
            if name not in ddp.parameters_to_ignore:
                averaged.add(id(parameter))
    trained = [
        (name.replace("module.", "", 1) if model in modules else name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in averaged
    ]
    return trained, modules[0].process_group


def require_unmarked(model: nn.Module) -> None:
    """Refuse parameters that other libraries mark as belonging to one rank.

    DeepSpeed and Megatron-LM set ``allreduce`` of experts to False, and Megatron-LM
    ``tensor_model_parallel`` of the parts of a matrix to True.
    """
    marked = [
        name
        for name, parameter in model.named_parameters()
        if getattr(parameter, "allreduce", True) is False
        or getattr(parameter, "tensor_model_parallel", False) is True
    ]
    if marked:
        raise LayoutError(
            f"{first_few(marked)}: marked as parameters that differ between ranks: say on which "
            f"ranks they differ, as in {EXAMPLE}"
        )


def _ddp_modules(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield module
