"""Where every gradient element of a model lives.

Clipping knows no plugin. A plugin hands it a :class:`Layout`: for each parameter the part this rank
holds, how that part falls into units, which ranks share a unit that a shard boundary cuts, and on
how many ranks the same elements are held. The modes work on that alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runner.clip import transfer

Number = float | Tensor
"""A figure on the host where looking is free (CPU), a 0-dimensional tensor elsewhere."""


@dataclass(frozen=True, slots=True)
class Units:
    """How a tensor falls into units, the groups of weights that feed one output.

    Brock et al. 2021 (arXiv 2102.06171, section 4): a row of a matrix, the fan-in of one output
    channel of a convolution. A transposed convolution keeps its output channels in dimension 1, and
    its groups side by side in dimension 0. Anything with fewer than two dimensions is one unit.

    Attributes:
        dims: dimensions reduced by a unit's norm, after ``groups`` was split off.
        groups: 0, or the number of groups to split dimension 0 into before reducing.
    """

    dims: tuple[int, ...]
    groups: int = 0

    def view(self, tensor: Tensor) -> Tensor:
        """``tensor`` with its groups split off; shares memory whatever the strides."""
        if not self.groups:
            return tensor
        inputs, *rest = tensor.shape
        return tensor.view(self.groups, inputs // self.groups, *rest)


def units_of(parameter: Tensor, module: nn.Module | None = None) -> Units:
    """Units of ``parameter``; ``module`` is its owner, where known, to tell transposed layers."""
    n = parameter.ndim
    if n < 2:
        return Units(tuple(range(n)))
    if isinstance(module, nn.modules.conv._ConvTransposeNd) and parameter is module.weight:
        if module.groups == 1:
            return Units((0, *range(2, n)))
        return Units((1, *range(3, n + 1)), groups=module.groups)
    return Units(tuple(range(1, n)))


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one parameter that lies on this rank.

    Attributes:
        name: the parameter's qualified name in the user's model.
        param: the parameter; of a DTensor only the part on this rank is ever worked on.
        units: how the local part falls into units.
        holders: ranks of the layout's group that hold these same elements (replicas).
        cut: the ranks over which each unit of this part is spread, or None where every unit lies
            whole on this rank. All of them see the same number of units.
        scattered: the parameter is one unit (a vector) whose elements lie on several ranks of the
            layout's group. Its figures are added up under its name.
    """

    name: str
    param: Tensor
    units: Units
    holders: int = 1
    cut: dist.ProcessGroup | None = None
    scattered: bool = False

    @property
    def weight(self) -> Tensor:
        """The part of the weight on this rank, a plain tensor without a history."""
        return local(self.param.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The part of the gradient on this rank, a plain tensor; None where there is none."""
        gradient = self.param.grad
        return None if gradient is None else local(gradient)


def local(tensor: Tensor) -> Tensor:
    """What of ``tensor`` lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds but a part of ``tensor``."""
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


class LayoutError(ValueError):
    """A layout that does not account for every element of a model exactly once."""


class Layout:
    """All parts on this rank, and the ranks that together hold the whole model.

    Args:
        pieces: one for each parameter; the same parameter twice counts once.
        group: ranks over which figures are added up. None where this rank holds everything
            (one process, or data-parallel replicas whose gradients were averaged).
        head: name of the classifier head's weight, which adaptive clipping leaves out by default.
        names: of all parameters of the model, also those that lie on other ranks alone, in one
            order for all ranks; by default those of ``pieces``.
        scattered: names of all parameters that are one unit spread over ranks, likewise.
        elsewhere: type of device on which the other ranks have theirs, for a rank without pieces.

    Raises:
        TypeError: a parameter is complex.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        group: dist.ProcessGroup | None = None,
        head: str | None = None,
        names: Sequence[str] | None = None,
        scattered: Sequence[str] | None = None,
        elsewhere: str = "cpu",
    ) -> None:
        once: dict[int, Piece] = {}
        for piece in pieces:
            if piece.param.is_complex():
                raise TypeError(f"{piece.name} is complex: clipping is defined on real parameters")
            once.setdefault(id(piece.param), piece)
        self.pieces = list(once.values())
        self.group = group
        self.head = head
        self._elsewhere = elsewhere
        here = dict.fromkeys(piece.name for piece in self.pieces)
        self.names = list(here if names is None else names)
        vectors = dict.fromkeys(piece.name for piece in self.pieces if piece.scattered)
        self.scattered = list(vectors if scattered is None else scattered)

    @classmethod
    def of_model(cls, model: nn.Module) -> Layout:
        """Every parameter whole on this rank; tied parameters once, under their first name.

        Of a model whose parameters are sharded, as :meth:`of_sharded` over all ranks.
        """
        if any(is_sharded(parameter) for parameter in model.parameters()):
            assert dist.group.WORLD is not None
            return cls.of_sharded(model, dist.group.WORLD)
        pieces = [
            Piece(name, parameter, units_of(parameter, module))
            for name, parameter, module in _owned(model)
        ]
        return cls(pieces, head=head_weight(model))

    @classmethod
    def of_sharded(
        cls,
        model: nn.Module,
        group: dist.ProcessGroup,
        whole: Mapping[str, int] | None = None,
        ranks: Callable[[str], int] | None = None,
        renamed: Mapping[str, str] | None = None,
        head: str | None = None,
    ) -> Layout:
        """Every parameter where its DTensor placements say; a plain one is whole where it is.

        One collective, once: all ranks compare what they hold, and every element of the model has
        to be accounted for exactly once.

        Args:
            model: what this rank holds of the model, its parameters already spread.
            group: all ranks that hold any part of it.
            whole: elements of each parameter of the whole model, by name; by default those of
                ``model``.
            ranks: on how many ranks a parameter, by its name, lies at all, in parts or repeated;
                by default on all of ``group``.
            renamed: the name of a tied parameter by that of its copy, where it has copies.
            head: see :class:`Layout`.

        Raises:
            TypeError: a parameter cannot be placed; the message names it.
            LayoutError: the parts that the ranks hold do not add up to the model.
        """
        known = renamed or {}
        once: dict[int, Piece] = {}
        for own, parameter, module in _owned(model):
            if id(parameter) not in once:
                spread = group.size() if ranks is None else ranks(own)
                once[id(parameter)] = placed(known.get(own, own), parameter, module, spread)
        pieces = list(once.values())
        if whole is None:
            whole = {piece.name: piece.param.numel() for piece in pieces}
        names, scattered, elsewhere = _account(pieces, group, whole)
        return cls(pieces, group, head or head_weight(model), names, scattered, elsewhere)

    @classmethod
    def of_parameters(cls, parameters: Iterable[Tensor] | Tensor) -> Layout:
        """Whole tensors of unknown owners: dimension 0 of each is taken as the output unit.

        Raises:
            TypeError: one is sharded: only a whole model can be accounted for.
        """
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for i, parameter in enumerate(listed):
            if is_sharded(parameter):
                raise TypeError(f"parameters[{i}] is sharded over ranks: give the whole model")
        return cls(Piece(f"parameters[{i}]", p, units_of(p)) for i, p in enumerate(listed))

    @classmethod
    def union(cls, layouts: Mapping[str, Layout]) -> Layout:
        """The layout of several modules together: one norm over all their gradients.

        Args:
            layouts: the layout of each module, by the prefix that its parameters' names get. One
                without a group is that of a module which every rank holds whole, with the same
                gradients.

        Raises:
            LayoutError: two parameters would have the same name.
        """
        listed = list(layouts.items())
        if len(listed) == 1 and not listed[0][0]:
            return listed[0][1]
        group = next((layout.group for _, layout in listed if layout.group is not None), None)
        names = [prefix + name for prefix, layout in listed for name in layout.names]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(f"{', '.join(twice)}: two modules have a parameter of this name")
        pieces = []
        for prefix, layout in listed:
            copies = group.size() if group is not None and layout.group is None else 1
            for piece in layout.pieces:
                held = piece.holders * copies
                pieces.append(replace(piece, name=prefix + piece.name, holders=held))
        return cls(
            pieces,
            group,
            next((prefix + layout.head for prefix, layout in listed if layout.head), None),
            names,
            [prefix + name for prefix, layout in listed for name in layout.scattered],
            listed[0][1].device.type,
        )

    @property
    def device(self) -> torch.device:
        """Where figures are added up: the same type of device on all ranks."""
        return self.pieces[0].param.device if self.pieces else torch.device(self._elsewhere)

    def gradients(self) -> tuple[list[Piece], list[Tensor]]:
        """Parts that have a gradient (of at least one element), and these gradients.

        Raises:
            TypeError: a gradient is sparse.
        """
        pieces, gradients = [], []
        for piece in self.pieces:
            gradient = piece.param.grad
            if isinstance(gradient, DTensor):
                if any(placement.is_partial() for placement in gradient.placements):
                    raise TypeError(
                        f"{piece.name} has a gradient that its ranks have not added up yet"
                    )
                gradient = gradient.to_local()
            if gradient is None or gradient.numel() == 0:
                continue
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"{piece.name} has a sparse gradient: build the layer with sparse=False"
                )
            pieces.append(piece)
            gradients.append(gradient)
        return pieces, gradients

    def gather(self, figures: Sequence[Number]) -> list[list[Number]]:
        """Figures of all ranks, one column a figure; no collective where all is here.

        A gather rather than a sum: sums and maxima travel together, and every rank adds the same
        rows in the same order, so that all get the same bits.
        """
        if self.group is None:
            return [[figure] for figure in figures]
        row = transfer.on_device(figures, self.device)
        rows = [torch.empty_like(row) for _ in range(self.group.size())]
        dist.all_gather(rows, row, group=self.group)
        columns = torch.stack(rows, dim=1)
        return columns.tolist() if transfer.can_read(columns.device) else [list(c) for c in columns]

    def matching(self, patterns: Iterable[str]) -> frozenset[str]:
        """Names that match any glob of ``patterns``.

        Raises:
            ValueError: a pattern matches nothing; the message lists some names.
        """
        names = self.names
        found: set[str] = set()
        for pattern in patterns:
            hits = fnmatch.filter(names, pattern)
            if not hits:
                some = ", ".join([*names[:3], "...", *names[-3:]] if len(names) > 7 else names)
                raise ValueError(f"clip.exclude={pattern} matches no parameter of: {some}")
            found.update(hits)
        return frozenset(found)


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Every parameter under its qualified name, with the module that owns it."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, module


def placed(name: str, parameter: Tensor, module: nn.Module, ranks: int) -> Piece:
    """The part of ``parameter`` on this rank, as its placements say, if it lies on ``ranks`` ranks.

    Raises:
        TypeError: its placements leave open where its elements, or its units, lie.
        LayoutError: its parts do not divide ``ranks``.
    """
    units = units_of(parameter, module)
    if not isinstance(parameter, DTensor):
        return Piece(name, parameter, units, holders=ranks)
    parts, cutting = 1, []
    for axis, placement in enumerate(parameter.placements):
        size = parameter.device_mesh.size(axis)
        if placement.is_replicate() or size == 1:
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise TypeError(f"{name} is placed {placement}: neither a replica nor a shard")
        if units.groups and dim == 0:
            raise TypeError(
                f"{name} belongs to a transposed convolution with groups and is sharded along "
                "them: shard it along dimension 1"
            )
        parts *= size
        if (dim + bool(units.groups)) in units.dims:
            cutting.append(axis)
    if ranks % parts:
        raise LayoutError(f"{name} is split in {parts}, which does not divide its {ranks} ranks")
    if parameter.ndim < 2:
        return Piece(name, parameter, units, holders=ranks // parts, scattered=parts > 1)
    cut = _group(parameter.device_mesh, cutting)
    return Piece(name, parameter, units, holders=ranks // parts, cut=cut)


def _account(
    pieces: Sequence[Piece], group: dist.ProcessGroup, whole: Mapping[str, int]
) -> tuple[list[str], list[str], str]:
    """Names of all parameters, and of the scattered ones, if the parts add up to ``whole``; and
    the type of device that they are on.

    Raises:
        LayoutError: they do not.
    """
    here = [(p.name, p.weight.numel() / p.holders, p.scattered) for p in pieces]
    mine = (pieces[0].param.device.type if pieces else None, here)
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, mine, group=group)
    found: dict[str, float] = {}
    scattered: dict[str, None] = {}
    for _, rank in everywhere:
        for name, share, spread in rank:
            found[name] = found.get(name, 0.0) + share
            if spread:
                scattered[name] = None
    unknown = sorted(found.keys() - whole.keys())
    if unknown:
        raise LayoutError(
            f"{', '.join(unknown)}: no such parameter in the whole model (a weight that was tied "
            "is tied no longer, or ranks hold different models)"
        )
    for name, elements in whole.items():
        counted = found.get(name, 0.0)
        if abs(counted - elements) > 1e-6 * max(elements, 1):
            raise LayoutError(
                f"{name} has {elements} elements, but the ranks account for {counted:g}: its parts "
                "or its replicas are not what the layout takes them for"
            )
    return list(found), list(scattered), next((t for t, _ in everywhere if t), "cpu")


def _group(mesh: DeviceMesh, axes: list[int]) -> dist.ProcessGroup | None:
    """The ranks of a mesh that differ along ``axes``."""
    if not axes:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(names[axis] for axis in axes)]._flatten().get_group()


def head_weight(model: nn.Module) -> str | None:
    """Name of the classifier head's weight: the model's own word for it, or its last linear layer.

    timm's models answer ``get_classifier``. Where the head is tied to an embedding the name is that
    of the embedding, because the two are one parameter.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    ask = getattr(model, "get_classifier", None)
    head = ask() if callable(ask) else None
    if not isinstance(head, nn.Linear):
        head = linears[-1] if linears else None
    if head is None:
        return None
    return next((name for name, p in model.named_parameters() if p is head.weight), None)
