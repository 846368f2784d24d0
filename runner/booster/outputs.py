"""Find the loss and the logits in what a model returns."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.parallel.hooks import held_tensors


def returned_loss(outputs: Any) -> Tensor | None:
    """Return the loss in outputs: their ``loss``, the only one of a tuple, or the output itself."""
    loss = _part(outputs, "loss")
    if isinstance(loss, Tensor):
        return loss if _is_loss(loss) else None
    parts = outputs if isinstance(outputs, tuple | list) else [outputs]
    losses: list[Tensor] = [part for part in parts if _is_loss(part)]
    return losses[0] if len(losses) == 1 else None


def with_scalar_loss(outputs: Any) -> Any:
    """Return outputs with a loss that has no dimension, where the only loss has one element."""
    if returned_loss(outputs) is not None:
        return outputs
    if isinstance(outputs, Tensor):
        return outputs.reshape(()) if _has_one_element(outputs) else outputs
    loss = _part(outputs, "loss")
    if _has_one_element(loss):
        return _with_loss(outputs, loss.reshape(()))
    if type(outputs) not in (tuple, list):
        return outputs
    single = [part for part in outputs if _has_one_element(part)]
    if len(single) != 1:
        return outputs
    return type(outputs)(part.reshape(()) if part is single[0] else part for part in outputs)


def _with_loss(outputs: Any, loss: Tensor) -> Any:
    """Return outputs with another ``loss``."""
    if isinstance(outputs, tuple):
        return outputs._replace(loss=loss)  # type: ignore[attr-defined]
    changed = copy.copy(outputs)
    if isinstance(outputs, Mapping):
        changed["loss"] = loss
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        changed = replace(outputs, loss=loss)
    else:
        changed.loss = loss
    return changed


def not_reduced(name: str, loss: Tensor) -> str:
    """Return what is wrong with a loss that is no number."""
    return f"{name} has shape {list(loss.shape)}: reduce it to one number, such as its mean"


def unreduced_loss(outputs: Any) -> Tensor | None:
    """Return the ``loss`` in outputs if it has several elements, or none."""
    loss = _part(outputs, "loss")
    return loss if isinstance(loss, Tensor) and loss.numel() != 1 else None


def logits_of(outputs: Any) -> Any:
    """Return the attribute or entry ``logits`` of outputs; the outputs if there is none."""
    if isinstance(outputs, Tensor):
        return outputs
    loss = returned_loss(outputs) if isinstance(outputs, tuple | list) else None
    if loss is not None:
        return next((part for part in outputs if part is not loss), outputs)
    logits = _part(outputs, "logits")
    return outputs if logits is None else logits


def zero_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return 0 with a gradient of zeros for each tensor, also where elements are infinite."""
    return torch.stack([tensor.reshape(-1)[:0].sum() for tensor in tensors]).sum()


def holds_numbers(outputs: Any) -> bool:
    """Return whether outputs hold numbers, which may be means over a batch."""
    return any(not part.ndim and part.is_floating_point() for part in held_tensors(outputs))


class _Leaf(torch.autograd.Function):
    """Marks where a graph of outputs ends, so that they are told from parameters."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def as_leaf(tensor: Tensor) -> Tensor:
    """Return outputs without the graph of the model, from which a graph begins."""
    if not tensor.is_floating_point():
        return tensor
    marked: Tensor = _Leaf.apply(tensor.detach().requires_grad_())
    return marked


def nothing_of(returned: Tensor | None, outputs: Any) -> Tensor:
    """Return 0, with a gradient of zeros for outputs; the gradient of a mean over none is NaN."""
    numbers = _numbers(outputs)
    return zero_of([tensor for tensor in numbers if tensor is not returned] or numbers)


def sum_of(outputs: Any) -> Tensor:
    """Return the sum of all elements of outputs."""
    return torch.stack([tensor.sum() for tensor in _numbers(outputs)]).sum()


def _numbers(outputs: Any) -> list[Tensor]:
    numbers = [tensor for tensor in held_tensors(outputs) if tensor.is_floating_point()]
    assert numbers, "the model returned no tensor"
    return numbers


def _part(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _is_loss(part: Any) -> bool:
    return _has_one_element(part) and part.ndim == 0


def _has_one_element(part: Any) -> bool:
    return isinstance(part, Tensor) and part.numel() == 1 and part.is_floating_point()
