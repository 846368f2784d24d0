"""Find the output layers of a model, which adaptive clipping leaves out by default.

Brock et al. 2021 (arXiv 2102.06171, section 4.1) do not clip the final linear layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

_ASK = ("get_classifier", "get_output_embeddings")
"""Methods of timm's and transformers' models that return the output layer."""

_HEAD = {"head", "heads", "classif", "classifier", "logits", "aux"}
"""First or last words in names of heads."""


def head_weights(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of the model's heads, in the order of its parameters.

    If the model has a method ``get_classifier`` or ``get_output_embeddings``, its answer is used.
    Otherwise the head is the last linear layer, or the last convolution if there is no linear layer
    or if its name is that of a head. Further heads (a distilled one, auxiliary classifiers) are the
    last layers of modules with the name of a head, if they have the same number of outputs.

    A head that is tied to an embedding has the name of the embedding, because the two are one
    parameter.
    """
    weights = {id(p) for layer in _heads(_unwrapped(model)) for p in _weights(layer)}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in weights)


def _heads(model: nn.Module) -> list[Layer]:
    for question in _ASK:
        ask = getattr(model, question, None)
        answer = list(_modules_in(ask())) if callable(ask) else []
        if answer:
            # A model without classes answers with an Identity: it has no head.
            return [layer for module in answer for layer in _last_layers(module)]
    return _last_layers(model)


def _modules_in(answer: Any) -> Iterator[nn.Module]:
    """Yield the modules of an answer: one, or several in a tuple, a list or a mapping."""
    if isinstance(answer, Mapping | nn.ModuleDict):
        answer = list(answer.values())
    if isinstance(answer, Sequence | nn.ModuleList):
        for each in answer:
            yield from _modules_in(each)
    elif isinstance(answer, nn.Module):
        yield answer


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that have no parameters of their own."""
    while not any(callable(getattr(model, question, None)) for question in _ASK):
        within = [m for m in model.children() if next(m.parameters(), None) is not None]
        if len(within) != 1 or next(model.parameters(recurse=False), None) is not None:
            break
        [model] = within
    return model


def _last_layers(model: nn.Module) -> list[Layer]:
    """Return the output layer of ``model``, and those of its further heads."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Layer)}
    if not layers:
        return []
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    last = next(reversed(layers))
    if linear and _head_of(last) is None:
        last = linear[-1]
    # Of several layers in one head the last one stays.
    ends = {head: name for name in layers if (head := _head_of(name)) is not None}
    width = _outputs(layers[last])
    alike = [name for name in ends.values() if _outputs(layers[name]) == width]
    return [layers[name] for name in dict.fromkeys([*alike, last])]


def _head_of(name: str) -> str | None:
    """Return the innermost module on the path ``name`` that has the name of a head, or None."""
    path = name.split(".")
    for depth in range(len(path), 0, -1):
        # AuxLogits, aux1, head_dist, distillation_classifier.
        parts = re.findall(r"[a-z]+|[A-Z][a-z]*", path[depth - 1])
        if parts and {parts[0].lower(), parts[-1].lower()} & _HEAD:
            return ".".join(path[:depth])
    return None


def _outputs(layer: Layer) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _weights(layer: Layer) -> list[nn.Parameter]:
    """Return the weight, or the matrices that it is computed from."""
    weight = layer._parameters.get("weight")
    return [p for p in layer.parameters() if p.ndim > 1] if weight is None else [weight]
