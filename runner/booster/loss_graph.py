"""What a loss divides by, read off the graph of operations that autograd records.

A mean ends in a division: by the weights of the labels that a loss of torch counts, by a number of
elements, or by a tensor such as ``mask.sum()``. Autograd keeps these numbers for the backward pass,
so that they are exact, whatever the values of the loss are, and reading them runs no operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.booster.graph_places import (
    GraphError,
    NotLinear,
    Path,
    Place,
    Recorded,
    factor_of,
    shape_of,
    signed,
)
from runner.booster.terms import MASKED, Term, TorchLoss

_MEAN, _SUM = 1, 2
_MOST_NODES = 20_000
_MOST_WEIGHTS = 20
_PASSED = (
    "Alias",
    "Clamp",
    "Clone",
    "Copy",
    "Detach",
    "Expand",
    "MaskedFill",
    "NanToNum",
    "Neg",
    "Permute",
    "ReshapeAlias",
    "Squeeze",
    "ToCopy",
    "ToTorchTensor",
    "Transpose",
    "Unsafe",
    "Unsqueeze",
    "View",
    "Where",
)
"""Operations that leave a mean what it is: their names begin so."""
_ADDED = ("Add", "Sub", "Rsub", "Stack", "Cat")
_OF_ELEMENTS = ("Add", "Div", "Maximum", "Minimum", "Mul", "Rsub", "Sub")
_SUMS = ("Sum", "Nansum", "Dot", "Mv", "Mm")
_PARTS = ("Select", "Slice", "Split", "Unbind")
_ELEMENTS = (*_PARTS, "Index", "Take")
_OF_SAMPLES = (
    "Embedding",
    "Gather",
    "GridSampler",
    "Index",
    "Masked",
    "NllLoss",
    "Repeat",
    "Scatter",
    "Take",
    "Where",
)
"""Operations that may take parameters by numbers, or a mask, of samples: their names begin so."""
_SELECTING = (
    "Amax",
    "Amin",
    "Gather",
    "Index",
    "IndexSelect",
    "Kthvalue",
    "MaskedFill",
    "MaskedSelect",
    "Max",
    "Median",
    "Min",
    "Select",
    "Slice",
    "Sort",
    "Std",
    "Take",
    "Topk",
    "Var",
    "Where",
)
"""Operations that may take some samples because of others."""
_RANKING = ("Kthvalue", "Sort", "Topk")
_FURTHER = ("LogSoftmax", "Slice")
"""Operations of elements that may have been selected before."""


def terms_of(loss: Tensor, recorded: Recorded | None = None) -> list[Term]:
    """Return the parts that a loss is a sum of.

    Args:
        loss: a number with a graph.
        recorded: what was recorded while it was computed.

    Raises:
        GraphError: an operation on the way is not known. ``NotLinear`` if it is no sum or mean.
    """
    if loss.grad_fn is None:
        raise GraphError("it has no gradient")
    terms: list[Term] = []
    path = Path()
    if recorded is None:
        recorded = Recorded()
    elif recorded.numbers:
        path = path._replace(value=float(loss.detach()))
    places = [Place(loss.grad_fn, loss.output_nr, path, recorded)]
    for _ in range(_MOST_NODES):
        if not places:
            return terms
        place = places.pop()
        read = _read_scalar if place.is_scalar else _read_elements
        term, further = read(place)
        if term is not None:
            terms.append(term)
        places += reversed(further)
    raise GraphError("it is a sum of very many parts")


_Step = tuple[Term | None, list[Place]]


def _read_scalar(place: Place) -> _Step:
    name, before = place.name, place.before()
    if hasattr(place.node, "_saved_reduction"):
        return _loss_of_torch(place), []
    if name in ("Div", "Mul"):
        return _product(place)
    if name == "Mean":
        return None, place.before(place.averaged())
    if name.startswith(_ADDED):
        return None, place.parts()
    if name.startswith("Clamp") and _is_clamped(place.node):
        raise NotLinear("it clamps what it has summed")
    if name == "Sum":
        return None, place.before(place.added_up())
    if name.startswith(_PASSED):
        return None, before
    return _last_of(place), []


def _last_of(place: Place) -> Term:
    """Return the part of the loss that ends at a number."""
    name = place.name
    if name == "AccumulateGrad" or name.startswith(_ELEMENTS):
        return place.path.term(is_penalty=_is_penalty(place))
    if name.startswith(_SUMS):
        return place.path.term(weights=_vectors_of(place), is_penalty=_is_penalty(place))
    if _is_penalty(place):
        return place.path.term(is_penalty=True)
    if name == "Pow" and _is_sum_of_squares(place):
        return place.path.term()
    if hasattr(place.node, "saved_tensors"):
        raise GraphError(f"its graph ends in {place.node.name()}")
    raise NotLinear(f"it takes {name.lower()} of what it has summed")


def _read_elements(place: Place) -> _Step:
    """Read on inside of a sum or a mean: a number may still divide all its elements."""
    name, before = place.name, place.before()
    if name in ("Div", "Mul") and len(before) == 1:
        factor = factor_of(place.node)
        if factor is not None and not factor.ndim:
            return None, place.before(place.scaled())
    elif name == "Mean":
        path = place.path if place.averages_samples else place.averaged()
        return None, place.before(path)
    elif name == "Sum" or (name.startswith(_PASSED) and len(before) == 1):
        masks = _masks_of(place)
        path = place.path._replace(selected=(*place.path.selected, *masks))
        return None, place.before(path)
    elif _is_sum_of_parts(name, before):
        return None, place.parts()
    elif name == "Mul" and [_is_penalty(part) for part in before].count(True) == 1:
        return None, [part for part in before if not _is_penalty(part)]
    elements = _read_down(place)
    term = place.path.term(weights=tuple(elements.weights), is_penalty=_is_penalty(place))
    return elements.described(term), []


@dataclass
class _Elements:
    """How the elements of a sum or a mean come about.

    Attributes:
        weights: tensors that multiply or divide them.
        selects: operations that may select some of them.
        selected: masks of those that were selected, in a measurement.
        ranked: among how many elements the largest ones are taken; 0 if none are.
    """

    weights: list[Tensor] = field(default_factory=list)
    selects: set[str] = field(default_factory=set)
    selected: list[Tensor] = field(default_factory=list)
    ranked: int = 0

    def note_weight(self, weight: Tensor) -> None:
        self.weights.append(weight)
        if not bool(weight.all()):
            self.selects.add(MASKED)

    def note_selection(self, place: Place) -> None:
        name = place.name
        if name in _RANKING:
            sizes = [int(length) for length in place.node._saved_self_sym_sizes]
            if math.prod(sizes) != place.size or name == "Sort":
                self.ranked = sizes[signed(place.node._saved_dim)] if sizes else 0
            else:
                name += " of all"
        if name in _SELECTING:
            self.selects.add(name)
        self.selected += _masks_of(place)

    def described(self, term: Term) -> Term:
        """Return a term with what is known of its elements."""
        form = tuple(sorted(self.selects))
        selected = (*term.selected, *self.selected)
        return term._replace(form=form, selected=selected, ranked=self.ranked)


def _read_down(place: Place) -> _Elements:
    """Read down to functions of single elements, and to the outputs of the model."""
    elements = _Elements()
    places = [place]
    for _ in range(_MOST_WEIGHTS):
        if not places:
            break
        current = places.pop()
        if current.node in current.recorded.outputs:
            continue
        elements.note_selection(current)
        before = current.before()
        if hasattr(current.node, "_saved_reduction"):
            elements.weights += _weights_of_losses(current.node)
            continue
        if current.name in ("Div", "Mul") and len(before) == 1:
            factor = factor_of(current.node)
            if factor is None:
                continue
            elements.note_weight(factor)
        elif not current.name.startswith((*_PASSED, *_OF_ELEMENTS, *_FURTHER)):
            continue
        places += before
    return elements


def _weights_of_losses(node: Any) -> list[Tensor]:
    """Return what multiplies the losses of elements that one of torch does not reduce."""
    weight = getattr(node, "_saved_weight", None)
    of_positives = getattr(node, "_saved_pos_weight", None)
    weights = [] if weight is None else [weight.detach()]
    if weights and hasattr(node, "_saved_ignore_index"):
        labels = node._saved_target
        is_class = labels != signed(int(node._saved_ignore_index))
        weights = [weights[0][labels.where(is_class, 0)] * is_class]
    if of_positives is not None:
        weights.append(1 + (of_positives.detach() - 1) * node._saved_target)
    return weights


def _masks_of(place: Place) -> list[Tensor]:
    """Return which elements an operation selects by a mask or by indices, in a measurement."""
    node = place.node
    if not place.recorded.numbers:
        return []
    if place.name == "MaskedFill":
        return [~node._saved_mask]
    if place.name == "MaskedSelect":
        return [node._saved_mask]
    if place.name == "Where" and len(place.before()) == 1:
        is_first = node.next_functions[0][0] is not None
        return [node._saved_condition if is_first else ~node._saved_condition]
    return [_indexed(node)] if place.name == "Index" else []


def _indexed(node: Any) -> Tensor:
    """Return which elements are selected by indices."""
    sizes = [int(length) for length in node._saved_self_sym_sizes]
    indices = list(node._saved_indices)
    first = 0
    while indices and indices[0] is None:
        indices.pop(0)
        first += 1
    if not indices or any(index is None for index in indices):
        return torch.ones((), dtype=torch.bool)
    dimensions = sum(index.ndim if index.dtype == torch.bool else 1 for index in indices)
    chosen = torch.zeros(sizes[first : first + dimensions], dtype=torch.bool)
    chosen[tuple(index.cpu() for index in indices)] = True
    return chosen


def _vectors_of(place: Place) -> tuple[Tensor, ...]:
    """Return the constant vector of a product such as ``torch.dot``."""
    if len(place.before()) != 1:
        return ()
    for name in ("_saved_self", "_saved_tensor", "_saved_vec", "_saved_mat2"):
        vector = getattr(place.node, name, None)
        if isinstance(vector, Tensor):
            return (vector.detach(),)
    return (torch.full((1,), math.nan),)


def _is_sum_of_parts(name: str, before: list[Place]) -> bool:
    """Return whether elements are means of their own, or values plus a number or a penalty."""
    if name in ("Stack", "Cat"):
        return all(part.size == 1 for part in before)
    return name in ("Add", "Sub") and any(part.is_scalar or _is_penalty(part) for part in before)


def _product(place: Place) -> _Step:
    """Read a product or a quotient, of which one part may be a number that is learned."""
    before = place.before()
    if len(before) == 1:
        return None, place.before(place.scaled())
    learned = [_is_penalty(part) for part in before]
    if all(learned):
        return place.path.term(is_penalty=True), []
    if place.name == "Mul" and sum(learned) == 1:
        return None, [before[learned.index(False)]]
    if place.name == "Div" and learned == [False, True]:
        return None, before[:1]
    does = "divides by" if place.name == "Div" else "multiplies with"
    raise NotLinear(f"it {does} something that depends on the outputs")


def _is_penalty(place: Place) -> bool:
    """Return whether a value depends on parameters alone, and on no sample."""
    places = [place]
    for _ in range(200):
        if not places:
            return True
        current = places.pop()
        if current.name == "AccumulateGrad":
            if not isinstance(current.node.variable, nn.Parameter):
                return False  # inputs that have a gradient
            continue
        if _may_take_samples(current):
            return False
        places += current.before()
    return False


def _may_take_samples(place: Place) -> bool:
    """Return whether an operation may take samples beside parameters, or repeats for each sample.

    A constant of the shape of the parameters, such as weights of their squares, holds no samples.
    """
    node = place.node
    is_of_user = hasattr(node, "saved_tensors")
    if is_of_user or hasattr(node, "_saved_target") or place.name.startswith(_OF_SAMPLES):
        return True
    before = place.before()
    shape = shape_of(node, place.output)
    shapes = [shape_of(part.node, part.output) for part in before]
    if place.name == "Expand":
        return len(shapes[0]) != len(shape) or shapes[0][:1] != shape[:1]
    takes_constant = len(before) < len(node.next_functions)
    return takes_constant and (place.name not in _OF_ELEMENTS or shapes != [shape])


def _is_sum_of_squares(place: Place) -> bool:
    """Return whether a power is the square of a Euclidean norm."""
    norm = place.before()[0]
    if norm.name not in ("LinalgVectorNorm", "Norm"):
        return False
    order = getattr(norm.node, "_saved_ord", getattr(norm.node, "_saved_p", None))
    return order == 2 and place.node._saved_exponent == 2


def _is_clamped(node: Any) -> bool:
    """Return whether a limit has replaced a number."""
    value = float(node._saved_self.detach())
    lower = getattr(node, "_saved_min", None)
    upper = getattr(node, "_saved_max", None)
    is_below = lower is not None and value < float(lower)
    return is_below or (upper is not None and value > float(upper))


def _loss_of_torch(place: Place) -> Term:
    node = place.node
    weight = getattr(node, "_saved_weight", None)
    of_positives = getattr(node, "_saved_pos_weight", None)
    if node._saved_reduction == _SUM:
        weights = tuple(tensor for tensor in (weight, of_positives) if tensor is not None)
        path = place.path._replace(is_empty=not node._saved_self.numel())
        return path.term(weights=weights)
    inputs = place.before()
    elements = _read_down(inputs[0]) if inputs else _Elements()
    targets = node._saved_target
    path = place.path._replace(averages=True)
    of_elements: tuple[Tensor, ...] = ()
    if hasattr(node, "_saved_total_weight"):
        ignored = signed(int(node._saved_ignore_index))
        call = TorchLoss(targets, classes=True, ignored=ignored, weight=weight)
        total = node._saved_total_weight
        path = path.divided(float(total)).rounded(total.dtype)
    else:
        of_elements = () if weight is None or weight.shape != targets.shape else (weight,)
        call = TorchLoss(
            targets,
            classes=False,
            ignored=0,
            weight=weight if of_positives is None else of_positives,
            weighs_elements=bool(of_elements) and of_positives is None,
        )
        path = path.divided(max(targets.numel(), node._saved_self.numel()))
    return elements.described(path.term(call, weights=of_elements))
