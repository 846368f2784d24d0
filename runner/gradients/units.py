"""Layers of a model tell the units of their weights, for adaptive clipping, and the output layers.

A unit is the weights that feed one output (Brock et al. 2021, arXiv 2102.06171, section 4): a row
of a matrix, a filter of a convolution, a whole vector. Layers are recognised by their class, their
size attributes, or the shapes of their parameters, without importing the libraries that define
them. For a layer that is not recognised, the option ``units`` of the mode gives its units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

# Owners of parameters of three or more dimensions whose dimension 0 indexes outputs.
_OUTPUTS_FIRST = (nn.modules.conv._ConvNd, nn.Bilinear, nn.MultiheadAttention)
# Attributes of layers for the number of inputs and of outputs.
_SIZES = (("in_features", "out_features"), ("input_size", "output_size"))
# Methods of timm's and transformers' models that return the output layer.
_ASK = ("get_classifier", "get_output_embeddings")
Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, slots=True)
class Units:
    """How a tensor is divided into units."""

    dims: tuple[int, ...]  # reduced by a unit's norm, after groups were split off
    groups: int = 0  # to split dimension 0 into before reducing; 0 for none
    known: bool = True  # False where dimension 0 was assumed to index outputs

    @classmethod
    def of_outputs(cls, ndim: int, outputs: Iterable[int], known: bool = True) -> Units:
        """Return the units of a tensor, given the dimensions that index outputs; none: one unit."""
        kept = {dim % ndim for dim in outputs}
        return cls(tuple(dim for dim in range(ndim) if dim not in kept), known=known)

    def first(self, tensor: Tensor) -> Tensor:
        """Return a view of ``tensor`` with the dimensions that index units first."""
        if self.groups:
            tensor = tensor.view(self.groups, -1, *tensor.shape[1:])
        kept = [dim for dim in range(tensor.ndim) if dim not in self.dims]
        return tensor if kept == [*range(len(kept))] else tensor.permute(*kept, *self.dims)


def units_of(parameter: Tensor, module: nn.Module | None = None) -> Units:
    """Return the units of ``parameter``, which belongs to ``module``."""
    n = parameter.ndim
    if n < 2:
        return Units(tuple(range(n)))
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        inputs = module.in_channels
        outputs = module.out_channels // module.groups
        if parameter.shape[:2] == (inputs, outputs):
            if module.groups == 1:
                return Units.of_outputs(n, (1,))
            return Units((1, *range(3, n + 1)), groups=module.groups)
    outputs_in = None if module is None else _outputs(parameter, module)
    if outputs_in is not None:
        return Units.of_outputs(n, outputs_in)
    return Units.of_outputs(n, (0,), known=n < 3 or isinstance(module, _OUTPUTS_FIRST))


def owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield every parameter under its qualified name, with the module that owns it.

    The tensors of which a parametrization computes a weight belong to the layer of that weight.
    """
    for prefix, module in model.named_modules():
        owner = module
        if isinstance(module, ParametrizationList):
            owner = model.get_submodule(prefix.rpartition("parametrizations.")[0].rstrip("."))
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, owner


def _outputs(parameter: Tensor, module: nn.Module) -> tuple[int, ...] | None:
    """Return the dimensions that index outputs; None if the owner does not show them."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return ()  # A vector of gains, in the shape of what is normalised.
    if isinstance(module, _OUTPUTS_FIRST):
        return None
    shape = tuple(parameter.shape)
    is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    if len(shape) == 2 and is_conv1d and getattr(module, "nf", shape[1]) == shape[1]:
        return (1,)  # transformers' linear layer of GPT-2: [in, out].
    outputs = _outputs_of_experts(module) if len(shape) == 3 else None
    if outputs is None and len(shape) in (2, 3):
        outputs = _outputs_by_size(shape, module)
    if outputs is None and len(shape) > 2 and sum(size > 1 for size in shape) < 2:
        return ()  # A vector with further dimensions of size 1, such as a scale for each channel.
    return outputs


def _outputs_of_experts(module: nn.Module) -> tuple[int, ...] | None:
    """Return (0, 1) for transformers' experts [experts, out, in], and (0, 2) for [.., in, out].

    The first of the two weights has the outputs of two projections, so the shapes of both tell.
    """
    up = getattr(module, "gate_up_proj", None)
    down = getattr(module, "down_proj", None)
    if not (isinstance(up, Tensor) and isinstance(down, Tensor) and up.ndim == down.ndim == 3):
        return None
    _, up_1, up_2 = up.shape
    _, down_1, down_2 = down.shape
    if (up_1, up_2) == (2 * down_2, down_1):
        return (0, 1)
    if (up_2, up_1) == (2 * down_1, down_2):
        return (0, 2)
    return None


def _outputs_by_size(shape: tuple[int, ...], module: nn.Module) -> tuple[int, ...] | None:
    """Return the dimensions that index outputs by a layer's attributes for its sizes."""
    n = len(shape)
    for inward, outward in _SIZES:
        inputs = getattr(module, inward, None)
        outputs = getattr(module, outward, None)
        if inputs != outputs and shape.count(outputs) == 1:
            if shape[-2:] == (inputs, outputs):
                return (*range(n - 2), n - 1)
            if shape[-2:] == (outputs, inputs):
                return tuple(range(n - 1))
    return None


def head_weights(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of the model's heads, in the order of its parameters.

    Brock et al. (section 4.1) do not clip the final linear layer. A model's ``get_classifier`` or
    ``get_output_embeddings`` tells it. Otherwise the head is the last linear layer, or the last
    convolution of a model without one. A head that is tied to an embedding has the name of the
    embedding, because the two are one parameter.
    """
    weights = {id(p) for layer in _heads(_unwrapped(model)) for p in _weights(layer)}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in weights)


def _heads(model: nn.Module) -> list[Layer]:
    asks = (getattr(model, question, None) for question in _ASK)
    answers = (_modules_in(ask()) for ask in asks if callable(ask))
    # A model without classes answers with an Identity: it has no head.
    modules = next(filter(None, answers), [model])
    return [layer for module in modules for layer in _last_layer(module)]


def _modules_in(answer: Any) -> list[nn.Module]:
    """Return the modules of an answer: one, or several in a tuple, a list or a mapping."""
    if isinstance(answer, Mapping | nn.ModuleDict):
        answer = list(answer.values())
    if isinstance(answer, Sequence | nn.ModuleList):
        return [module for part in answer for module in _modules_in(part)]
    return [answer] if isinstance(answer, nn.Module) else []


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers that have no parameters of their own."""
    while not any(callable(getattr(model, question, None)) for question in _ASK):
        within = [m for m in model.children() if next(m.parameters(), None) is not None]
        if len(within) != 1 or next(model.parameters(recurse=False), None) is not None:
            break
        [model] = within
    return model


def _last_layer(model: nn.Module) -> list[Layer]:
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    linear: list[Layer] = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return (linear or layers)[-1:]


def _weights(layer: Layer) -> list[nn.Parameter]:
    """Return the weight, or the matrices that it is computed from."""
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return [p for p in layer.parameters() if p.ndim > 1] if weight is None else [weight]
