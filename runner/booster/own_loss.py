"""The loss that a model returns with its outputs, as those of transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def returned_loss(outputs: Any) -> Tensor | None:
    """Return the loss in the outputs of a model; None if there is none.

    It is a tensor without dimensions: the attribute or entry ``loss``, the only such tensor of a
    tuple, such as (logits, loss), or the output itself.
    """
    if isinstance(outputs, Tensor):
        return outputs if _is_loss(outputs) else None
    if isinstance(outputs, tuple | list):
        losses = [each for each in outputs if _is_loss(each)]
        found = losses[0] if len(losses) == 1 else None
        if found is not None or not hasattr(outputs, "loss"):
            return found
    found = _part(outputs, "loss")
    return found if _is_loss(found) else None


def logits_of(outputs: Any) -> Any:
    """Return the attribute or entry ``logits`` of outputs; the outputs if there is none."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list) and returned_loss(outputs) is not None:
        rest = without_loss(outputs)
        return rest[0] if rest else outputs
    found = _part(outputs, "logits")
    return outputs if found is None else found


def without_loss(outputs: Any) -> Any:
    """Return outputs without their loss, as a list or mapping; a loss alone as it is."""
    loss = returned_loss(outputs)
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list):
        return [each for each in outputs if each is not loss] or loss
    parts = outputs if isinstance(outputs, Mapping) else vars(outputs)
    return {name: part for name, part in parts.items() if part is not loss} or loss


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model of transformers compares each output with the label after it.

    Causal language models do, unless an encoder reads the inputs and a decoder the shifted labels.
    """
    function = getattr(model, "loss_function", None)
    causal = getattr(function, "__name__", "") == "ForCausalLMLoss"
    return causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _part(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _is_loss(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim == 0 and part.is_floating_point()
