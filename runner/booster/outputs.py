"""Find the loss and the logits in what a model returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from runner.parallel.hooks import held_tensors


def returned_loss(outputs: Any) -> Tensor | None:
    """Return the loss in outputs: their ``loss``, the only one of a tuple, or the output itself."""
    parts = outputs if isinstance(outputs, tuple | list) else [outputs]
    losses: list[Tensor] = [part for part in parts if _is_loss(part)]
    if len(losses) == 1:
        return losses[0]
    loss = _part(outputs, "loss")
    return loss if _is_loss(loss) else None


def not_reduced(name: str, loss: Tensor) -> str:
    """Return what is wrong with a loss that is no number."""
    return f"{name} has shape {list(loss.shape)}: reduce it to one number, such as its mean"


def unreduced_loss(outputs: Any) -> Tensor | None:
    """Return the ``loss`` in outputs if it is no number."""
    loss = _part(outputs, "loss")
    return loss if isinstance(loss, Tensor) and loss.ndim else None


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
    return isinstance(part, Tensor) and part.ndim == 0 and part.is_floating_point()
