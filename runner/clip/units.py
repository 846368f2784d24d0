"""Units of adaptive clipping: the weights that feed one output.

Dimension 0 indexes the outputs of most layers. Other layers are recognised by their class, their
size attributes, or the shapes of their parameters, without importing the libraries that define
them. For all others the option ``units`` of the mode gives the dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

_OUTPUTS_FIRST = (nn.modules.conv._ConvNd, nn.Bilinear, nn.MultiheadAttention)
"""Owners of parameters of three or more dimensions whose dimension 0 indexes outputs."""

_SIZES = (("in_features", "out_features"), ("input_size", "output_size"))
"""Attributes of layers for the number of inputs and of outputs."""


@dataclass(frozen=True, slots=True)
class Units:
    """How a tensor is divided into units, each the weights that feed one output.

    Brock et al. 2021 (arXiv 2102.06171, section 4): a row of a matrix, the fan-in of one output
    channel of a convolution. A transposed convolution keeps its output channels in dimension 1, and
    its groups side by side in dimension 0. Anything with fewer than two dimensions is one unit.

    Attributes:
        dims: dimensions reduced by a unit's norm, after ``groups`` was split off.
        groups: 0, or the number of groups to split dimension 0 into before reducing.
        known: False where dimension 0 was assumed to index outputs, because neither the layer nor
            the user says so.
    """

    dims: tuple[int, ...]
    groups: int = 0
    known: bool = True

    @classmethod
    def of_outputs(cls, ndim: int, outputs: Iterable[int], known: bool = True) -> Units:
        """Return the units of a tensor of ``ndim`` dimensions, given those that index outputs.

        Without such a dimension the whole tensor is one unit.
        """
        kept = {dim % ndim for dim in outputs}
        return cls(tuple(dim for dim in range(ndim) if dim not in kept), known=known)

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view of ``tensor`` in which the groups have a dimension of their own."""
        if not self.groups:
            return tensor
        inputs, *rest = tensor.shape
        return tensor.view(self.groups, inputs // self.groups, *rest)

    def first(self, tensor: Tensor) -> Tensor:
        """Return a view of ``tensor`` with the dimensions that index units first."""
        view = self.view(tensor)
        kept = [dim for dim in range(view.ndim) if dim not in self.dims]
        return view if kept == [*range(len(kept))] else view.permute(*kept, *self.dims)


def units_of(parameter: Tensor, module: nn.Module | None = None) -> Units:
    """Return the units of ``parameter``."""
    n = parameter.ndim
    if n < 2:
        return Units(tuple(range(n)))
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        inputs, outputs = module.in_channels, module.out_channels // module.groups
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

    What a parametrization computes a weight from belongs to the layer that has the weight.
    """
    for prefix, module in model.named_modules():
        owner = module
        if isinstance(module, ParametrizationList):
            owner = model.get_submodule(prefix.rpartition("parametrizations.")[0].rstrip("."))
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, owner


def _outputs(parameter: Tensor, module: nn.Module) -> tuple[int, ...] | None:
    """Return the dimensions that index outputs; None if the owner does not show them."""
    n, shape = parameter.ndim, tuple(parameter.shape)
    is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return ()  # A vector of gains, in the shape of what is normalised.
    if isinstance(module, _OUTPUTS_FIRST):
        return None
    if n == 2 and is_conv1d and getattr(module, "nf", shape[1]) == shape[1]:
        return (1,)  # transformers' linear layer of GPT-2: [in, out].
    if n == 3 and (stacked := _stacked_experts(parameter, module)) is not None:
        return stacked
    for inward, outward in _SIZES if n in (2, 3) else ():
        inputs, outputs = getattr(module, inward, None), getattr(module, outward, None)
        if inputs != outputs and shape.count(outputs) == 1:
            if shape[-2:] == (inputs, outputs):
                return (*range(n - 2), n - 1)
            if shape[-2:] == (outputs, inputs):
                return tuple(range(n - 1))
    if n > 2 and sum(size > 1 for size in shape) < 2:
        return ()  # A vector with further dimensions of size 1, such as a scale for each channel.
    return None


def _stacked_experts(parameter: Tensor, module: nn.Module) -> tuple[int, ...] | None:
    """Return the dimensions that index outputs of weights [experts, ...]; None if unknown.

    transformers stores [experts, out, in] (Mixtral, Qwen), some of its models [experts, in, out],
    for ``torch.bmm``. ``gate_up_proj`` has the outputs of two projections side by side, so its
    shape beside that of ``down_proj`` tells one from the other, whatever the sizes.
    """
    own = module._parameters
    gate_up, down = own.get("gate_up_proj"), own.get("down_proj")
    if gate_up is not None and down is not None and gate_up.ndim == down.ndim == 3:
        (_, a, b), (_, c, d) = gate_up.shape, down.shape
        if (a, b) == (2 * d, c):
            return (0, 1)
        if (b, a) == (2 * c, d):
            return (0, 2)
    match getattr(module, "is_transposed", None):
        case True:
            return (0, 2)
        case False:
            return (0, 1)
    return None
