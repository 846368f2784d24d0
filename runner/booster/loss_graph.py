"""What a loss divides by, read off the graph of operations that autograd records.

A mean ends in a division: by the weights of the labels that a loss of torch counts, by a number of
elements, or by a tensor such as ``mask.sum()``. Autograd keeps these numbers for the backward pass,
so that they are exact, whatever the values of the loss are, and reading them runs no operation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from runner.booster.graph_places import (
    GraphError,
    NotLinear,
    Path,
    Place,
    factor_of,
    number_of,
)
from runner.booster.terms import Term, TorchLoss

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
_OF_PARAMETERS = (
    *_ADDED,
    "Abs",
    "Clone",
    "Div",
    "Exp",
    "LinalgVectorNorm",
    "Log",
    "Mean",
    "Mul",
    "Neg",
    "Norm",
    "Permute",
    "Pow",
    "Sigmoid",
    "Softplus",
    "Sqrt",
    "Squeeze",
    "Sum",
    "ToCopy",
    "Transpose",
    "Unsqueeze",
    "View",
    *_PARTS,
)
"""Operations that keep a value one of parameters alone. Products of matrices may hold samples."""


def terms_of(loss: Tensor) -> list[Term]:
    """Return the parts that a loss is a sum of.

    Raises:
        GraphError: an operation on the way is not known. ``NotLinear`` if it is no sum or mean.
    """
    if loss.grad_fn is None:
        raise GraphError("it has no gradient")
    terms: list[Term] = []
    places = [Place(loss.grad_fn, loss.output_nr, Path())]
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
    if _is_learned_number(place) or _is_penalty(place):
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
        return None, place.before(place.averaged())
    elif name == "Sum" or (name.startswith(_PASSED) and len(before) == 1):
        return None, before
    elif _is_sum_of_parts(name, before):
        return None, place.parts()
    elif name == "Mul" and [_is_penalty(part) for part in before].count(True) == 1:
        return None, [part for part in before if not _is_penalty(part)]
    return place.path.term(weights=_weights_of(place), is_penalty=_is_penalty(place)), []


def _weights_of(place: Place) -> tuple[Tensor, ...]:
    """Return the tensors that multiply or divide elements, down to functions of single elements."""
    weights = []
    places = [place]
    for _ in range(_MOST_WEIGHTS):
        if not places:
            break
        current = places.pop()
        before = current.before()
        if current.name in ("Div", "Mul") and len(before) == 1:
            factor = factor_of(current.node)
            if factor is None:
                continue
            weights.append(factor)
        elif not current.name.startswith((*_PASSED, *_OF_ELEMENTS)):
            continue
        places += before
    return tuple(weights)


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
    """Return whether elements are means of their own, or values plus a penalty."""
    if name in ("Stack", "Cat"):
        return all(part.is_scalar for part in before)
    return name in ("Add", "Sub") and any(_is_penalty(part) for part in before)


def _product(place: Place) -> _Step:
    """Read a product or a quotient, of which one part may be a number that is learned."""
    before = place.before()
    if len(before) == 1:
        return None, place.before(place.scaled())
    learned = [_is_learned_number(part) or _is_penalty(part) for part in before]
    if all(learned):
        return place.path.term(is_penalty=True), []
    if place.name == "Mul" and sum(learned) == 1:
        return None, [before[learned.index(False)]]
    if place.name == "Div" and learned == [False, True]:
        return None, before[:1]
    does = "divides by" if place.name == "Div" else "multiplies with"
    raise NotLinear(f"it {does} something that depends on the outputs")


def _is_learned_number(place: Place) -> bool:
    """Return whether a number depends on parameters that are numbers, or on one entry of some."""
    places = [place]
    for _ in range(100):
        if not places:
            return True
        current = places.pop()
        if not current.is_scalar:
            return False
        before = current.before()
        if current.name.startswith(_ELEMENTS) and before[0].name == "AccumulateGrad":
            continue
        places += before
    return False


def _is_penalty(place: Place) -> bool:
    """Return whether a value depends on parameters alone, and on no sample."""
    places = [place]
    for _ in range(200):
        if not places:
            return True
        current = places.pop()
        if current.name == "AccumulateGrad":
            continue
        if not current.name.startswith(_OF_PARAMETERS):
            return False
        before = current.before()
        if current.name in ("Mul", "Div") and len(before) == 1 and number_of(current.node) is None:
            return False  # Something else than a number, such as the inputs.
        places += before
    return False


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
        return place.path.term(weights=weights)
    path = place.path._replace(averages=True)
    targets = node._saved_target
    if not hasattr(node, "_saved_total_weight"):
        of_elements = () if weight is None or weight.shape != targets.shape else (weight,)
        of_classes = weight if of_positives is None else of_positives
        call = TorchLoss(
            targets,
            classes=False,
            ignored=0,
            weight=of_classes,
            weighs_elements=bool(of_elements) and of_positives is None,
        )
        path = path.divided(max(targets.numel(), node._saved_self.numel()))
        return path.term(call, weights=of_elements)
    ignored = int(node._saved_ignore_index)
    signed = ignored - (1 << 64) if ignored >= 1 << 63 else ignored
    call = TorchLoss(targets, classes=True, ignored=signed, weight=weight)
    total = node._saved_total_weight
    return path.divided(float(total)).rounded(total.dtype).term(call)
