"""The parts of a model that lie on this rank, and what all ranks know of them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.check.reference import combined, root
from runner.gradients.over_ranks import process_groups_of
from runner.gradients.shard import is_dtensor, local, position_of
from runner.gradients.units import owned_parameters

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",
}
_SAMPLE = 128  # elements of a tensor that ranks compare


@dataclass(eq=False)
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
        return None if gradient is None else local(gradient.detach())


class Facts(NamedTuple):
    """What a rank tells all others of a part, before the clipping."""

    name: str
    key: str
    position: tuple[int, ...]
    pattern: str | None
    sharded: bool
    trained: bool
    shape: tuple[int, ...]
    elements: int  # of the local shard
    largest: int
    dtype: str  # of the gradient
    has_gradient: bool
    partial: str  # placements of a gradient whose ranks have not added it up
    embeds: bool
    power: float
    finite: bool
    weight: tuple[float, ...]
    gradient: tuple[float, ...]
    problem: str = ""


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
    parts: list[Part] = []
    problems: list[str] = []
    seen: set[int] = set()
    for name, parameter, module in owned_parameters(model):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        key = name
        pattern = None
        for glob, group in process_groups.items():
            if fnmatch.fnmatchcase(name, glob):
                pattern = glob
                if hasattr(group, "rank") and group.rank() >= 0:
                    key = f"{name}@{group.rank()}"
                else:
                    problems.append(f"{name} lies on a rank outside of the group of {glob!r}")
                break
        position, _ = position_of(parameter)
        parts.append(Part(name, key, parameter, module, position, pattern))
    return parts, problems


def facts_of(parts: list[Part]) -> list[Facts]:
    """Return what this rank tells others of its parts; the host waits once."""
    weights = Samples([local(part.parameter.detach()) for part in parts]).projections()
    gradients = Samples([part.before for part in parts]).projections()
    facts: list[Facts] = []
    for number, part in enumerate(parts):
        gradient = part.parameter.grad
        partial = ""
        if is_dtensor(gradient) and any(place.is_partial() for place in gradient.placements):
            partial = str(tuple(gradient.placements))
        before = part.before
        facts.append(
            Facts(
                name=part.name,
                key=part.key,
                position=part.position,
                pattern=part.pattern,
                sharded=bool(part.position),
                trained=part.parameter.requires_grad,
                shape=tuple(part.parameter.shape),
                elements=local(part.parameter).numel(),
                largest=0 if before is None else before.numel(),
                dtype=str(part.parameter.dtype if before is None else before.dtype),
                has_gradient=before is not None,
                partial=partial,
                embeds=_embeds(part),
                power=part.power,
                finite=math.isfinite(part.power),
                weight=tuple(weights[number]),
                gradient=tuple(gradients[number]),
            )
        )
    return facts


def _embeds(part: Part) -> bool:
    kind = type(part.module).__name__.lower()
    return part.parameter.ndim == 2 and ("embed" in kind or "embed" in part.name.lower())


class Samples:
    """Some elements of each of many tensors, the same ones on every rank, in float64 on the host.

    One operation works on all of them, because models have many small tensors.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.count = len(tensors)
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if tensor is not None and not tensor.is_meta and tensor.numel():
                flat = tensor.reshape(-1)
                sample = flat[:: max(1, flat.numel() // _SAMPLE)]
                by_device.setdefault(sample.device, []).append((number, sample))
        owners: list[Tensor] = []
        places: list[Tensor] = []
        values: list[Tensor] = []
        for rows in by_device.values():
            sizes = torch.tensor([len(sample) for _, sample in rows])
            starts = sizes.cumsum(0) - sizes
            values.append(torch.cat([sample for _, sample in rows]).double().cpu())
            owners.append(torch.tensor([number for number, _ in rows]).repeat_interleave(sizes))
            places.append(torch.arange(len(values[-1])) - starts.repeat_interleave(sizes))
        self.values = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
        self.owners = torch.cat(owners) if owners else torch.zeros(0, dtype=torch.int64)
        self.places = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over the sample of each tensor of ``values``, one for each element."""
        total = torch.zeros(self.count, dtype=torch.float64)
        return total.index_add_(0, self.owners, values)

    def largest(self) -> Tensor:
        """Return the largest absolute element of the sample of each tensor."""
        total = torch.zeros(self.count, dtype=torch.float64)
        return total.scatter_reduce_(0, self.owners, self.values.abs(), "amax")

    def projections(self) -> list[list[float]]:
        """Return norm and two projections of each sample: replicas have equal ones."""
        angles = self.places.double()
        rows = [
            self.sums(self.values.square()).sqrt(),
            self.sums(self.values * angles.cos()),
            self.sums(self.values * angles.sin()),
        ]
        found: list[list[float]] = torch.stack(rows, dim=1).tolist()
        return found


def to_host(rows: list[Tensor]) -> list[Any]:
    """Return tensors of one shape as numbers; the host waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for number, row in enumerate(rows):
        by_device.setdefault(row.device, []).append(number)
    found: list[Any] = [None] * len(rows)
    for numbers in by_device.values():
        values = torch.stack([rows[number] for number in numbers]).tolist()
        for number, row in zip(numbers, values, strict=True):
            found[number] = row
    return found


@dataclass(eq=False)
class Unit:
    """A part of the whole model that counts once, and the ranks that hold it."""

    facts: Facts  # of its first rank
    holders: dict[int, Facts] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)  # names of other parts that are the same one

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def power(self) -> float:
        return self.facts.power


class Whole:
    """The whole model, as the facts of all ranks describe it.

    Attributes:
        units: each part once. A plain tensor in no group whose values differ between ranks is one
            part for each value.
        undeclared: names of such tensors.
        unequal: names of replicas whose gradients differ between ranks.
        tied: pairs of names of parameters on different ranks that are one.
    """

    def __init__(self, ranks: list[list[Facts]]) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.undeclared: list[str] = []
        self.unequal: list[str] = []
        self.tied: list[tuple[str, str]] = []
        units = self._units(set())
        if self.undeclared:
            # Equal biases beside weights that differ are parameters of each rank too.
            units = self._units({name.rpartition(".")[0] for name in self.undeclared})
        self.units = [unit for unit in units if unit.facts.trained]
        self.untrained = [unit for unit in units if not unit.facts.trained]
        for unit in self.units:
            tolerance = replica_tolerance(unit.facts.dtype)
            for fact in unit.holders.values():
                same = near(unit.facts.gradient, fact.gradient, tolerance)
                same = same and near((unit.power,), (fact.power,), tolerance)
                if not same and fact.name not in self.unequal:
                    self.unequal.append(fact.name)
        self._join_tied()

    def _units(self, apart: set[str]) -> list[Unit]:
        """Return each part once; parts of modules in ``apart`` are one if gradients are equal."""
        units: dict[tuple[Any, ...], Unit] = {}
        for rank, facts in enumerate(self.ranks):
            for fact in facts:
                key: tuple[Any, ...] = (fact.key, fact.position)
                tolerance = replica_tolerance(fact.dtype)
                while key in units:
                    first = units[key].facts
                    same = near(first.weight, fact.weight, 1e-4)
                    if fact.name.rpartition(".")[0] in apart:
                        same = same and near(first.gradient, fact.gradient, tolerance)
                    if same:
                        break
                    if fact.name not in self.undeclared:
                        self.undeclared.append(fact.name)
                    key = (*key, "other value")
                unit = units.setdefault(key, Unit(fact))
                unit.holders[rank] = fact
        return list(units.values())

    def _join_tied(self) -> None:
        """Join an embedding and a head on different ranks with equal weights and gradients."""
        for embedding in [unit for unit in self.units if unit.facts.embeds]:
            for other in self.units:
                first, second = embedding.facts, other.facts
                if other is embedding or embedding not in self.units:
                    continue
                if set(embedding.holders) & set(other.holders) or first.shape != second.shape:
                    continue
                if first.position != second.position or not any(first.gradient):
                    continue
                tolerance = replica_tolerance(first.dtype)
                if first.weight == second.weight and near(
                    first.gradient, second.gradient, tolerance
                ):
                    embedding.tied.append(second.key)
                    embedding.holders |= other.holders
                    self.tied.append((first.key, second.key))
                    self.units = [unit for unit in self.units if unit is not other]

    def norm(self, p: float) -> float:
        """Return the norm of the whole model, each element once."""
        return root(combined((unit.power for unit in self.units), p), p)


def near(first: tuple[float, ...], second: tuple[float, ...], tolerance: float) -> bool:
    """Return whether projections are equal up to a share of their norm; NaN equals NaN."""
    scale = max((abs(value) for value in (*first, *second) if math.isfinite(value)), default=0.0)
    for a, b in zip(first, second, strict=True):
        if math.isfinite(a) != math.isfinite(b):
            return False
        if math.isfinite(a) and abs(a - b) > tolerance * scale:
            return False
    return True


def replica_tolerance(dtype: str) -> float:
    """Return by what share gradients of replicas may differ: kernels may add in another order."""
    return 2e-2 if "float16" in dtype else 1e-3


def names_missing(ranks: list[list[Facts]]) -> Iterator[tuple[int, list[str]]]:
    """Yield ranks, and the parameters that have a gradient on another rank but not on theirs."""
    everywhere: dict[str, set[int]] = {}
    for rank, facts in enumerate(ranks):
        for fact in facts:
            if fact.has_gradient:
                everywhere.setdefault(fact.name, set()).add(rank)
    for rank, facts in enumerate(ranks):
        missing = [f.name for f in facts if not f.has_gradient and f.name in everywhere]
        if missing:
            yield rank, missing
