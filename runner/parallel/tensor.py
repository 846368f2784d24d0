"""Tensor parallelism: the weights of a layer are sharded over ranks (Shoeybi et al. 2019).

Source: arXiv 1909.08053. Parameters become DTensors. Layers compute on plain local tensors, with
one collective wherever shards meet. README.md says why torch's own styles are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.nn import functional as F

from runner.parallel.collectives import copy_to, gather, span, split, sum_of
from runner.parallel.hooks import carry_over
from runner.parallel.tensor_styles import style_of

SEQUENCE = 1  # dimension of positions in activations [B, T, width]


class Entrance:
    """Lets several layers (query, key, value) share the collective by which one input enters."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._served = 0
        self._last: tuple[Any, ...] = (None,)  # input, its version and mode, and the entered input

    def __call__(self, hidden: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        state = hidden._version, torch.is_grad_enabled()
        if self._last[0] is not hidden or self._last[1] != state:
            self._last = (hidden, state, enter(hidden))
            self._served = 0
        entered: Tensor = self._last[2]
        self._served += 1
        if self._served == self._layers:  # Activations are not kept longer than they are used.
            self._last = (None,)
        return entered


@dataclass(frozen=True)
class Region:
    """The ranks that share a module, and how activations enter and leave it."""

    group: dist.ProcessGroup
    sequence: bool  # whether activations between sharded layers are sharded along the sequence
    entrance: Entrance | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """Return the region itself: copies of a model use the same process group."""
        return self

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the whole input of a layer of which each rank computes a part."""
        if self.entrance is None or torch.compiler.is_compiling():
            return self._enter(hidden)
        return self.entrance(hidden, self._enter)

    def _enter(self, hidden: Tensor) -> Tensor:
        return self.whole(hidden, sums=True) if self.sequence else copy_to(hidden, self.group)

    def whole(self, hidden: Tensor, sums: bool = False) -> Tensor:
        length = hidden.shape[SEQUENCE] * self.group.size()
        return gather(hidden, SEQUENCE, length, self.group, sums=sums)

    def leave(self, partial_sums: Tensor) -> Tensor:
        """Return the output of a layer: the sum over ranks, or this rank's shard of it."""
        if self.sequence:
            return self.split(partial_sums, sums=True)
        return sum_of(partial_sums, self.group)

    def split(self, hidden: Tensor, sums: bool = False) -> Tensor:
        length = hidden.shape[SEQUENCE]
        if length % self.group.size():
            raise ValueError(
                f"a sequence of {length} cannot be split evenly over tp_size "
                f"{self.group.size()}: choose a length that it divides, or sequence_parallel=false"
            )
        return split(hidden, SEQUENCE, self.group, sums=sums)


Run = Callable[..., Any]  # given its region, a module, its own forward, and the arguments


def _own(region: Region, module: nn.Module, forward: Run, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _colwise(region: Region, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    return F.linear(region.enter(hidden), module.weight, module.bias)


def _colwise_rep(region: Region, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    shard = _colwise(region, module, forward, hidden)
    return gather(shard, -1, module.out_features, region.group, sums=False)


def _rowwise(region: Region, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    summed = region.leave(F.linear(hidden, module.weight))
    return summed if module.bias is None else summed + module.bias


def _rowwise_split_input(region: Region, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    return _rowwise(region, module, forward, split(hidden, -1, region.group))


def _embedding(region: Region, module: nn.Embedding, forward: Run, tokens: Tensor) -> Tensor:
    start, length = span(module.num_embeddings, region.group.size(), region.group.rank())
    if length == 0:
        zeros = tokens.new_zeros((*tokens.shape, module.embedding_dim), dtype=module.weight.dtype)
        return sum_of(zeros + module.weight.sum(), region.group)
    in_shard = (tokens >= start) & (tokens < start + length)
    # Tokens outside the vocabulary stay outside every shard, so that torch raises an IndexError.
    elsewhere = ~in_shard & (tokens >= 0) & (tokens < module.num_embeddings)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < start + length else None
    rows = F.embedding((tokens - start).masked_fill(elsewhere, 0), module.weight, padding)
    return sum_of(rows * in_shard.unsqueeze(-1), region.group)


def _split_sequence(region: Region, module: nn.Module, forward: Run, *args: Any, **kw: Any) -> Any:
    output = forward(*args, **kw)
    return region.split(output) if region.sequence else output


def _whole_sequence(region: Region, module: nn.Module, forward: Run, hidden: Tensor) -> Any:
    if not region.sequence:
        return forward(hidden)
    return region.split(forward(region.whole(hidden)))


RUNS: Mapping[str, Run] = {  # what runs instead of a module's own forward, by style
    "colwise": _colwise,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
    "colwise_rep": _colwise_rep,
    "colwise_gather_output": _colwise_rep,
    "embedding_rowwise": _embedding,
    "split_sequence": _split_sequence,
    "whole_sequence": _whole_sequence,
}


@dataclass
class _Forward:
    run: Run
    region: Region
    module: nn.Module
    forward: Run  # the module's own
    partial: frozenset[str]  # parameters of which each rank computes a part of the gradient

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _local_parameters(self.module, self.partial):
            return self.run(self.region, self.module, self.forward, *args, **kwargs)


@contextmanager
def _local_parameters(module: nn.Module, partial: frozenset[str]) -> Iterator[None]:
    """Replace a module's own DTensor parameters by their differentiable local tensors."""
    parameters: dict[str, Any] = module._parameters
    before = dict(parameters)
    try:
        for name, parameter in before.items():
            if isinstance(parameter, DTensor):
                gradient = [Partial()] if name in partial else None
                parameters[name] = parameter.to_local(grad_placements=gradient)
        yield
    finally:
        parameters.update(before)


def parallelize(
    model: nn.Module,
    styles: Mapping[str, str],
    mesh: DeviceMesh,
    device: torch.device,
    *,
    sequence: bool,
) -> None:
    """Shard the parameters of planned modules in place, and replicate all others as DTensors.

    They are allocated on ``device``, without values.
    """
    # Modules inside these get whole sequences.
    whole = tuple(f"{name}." for name, style in styles.items() if style == "whole_sequence")
    entrances = _entrances(styles)
    # Each original parameter with its DTensor, by the id of the original, which is kept alive so
    # that no other tensor gets this id.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, module in model.named_modules():
        if name not in styles and next(module.parameters(), None) is None:
            continue
        style = style_of(styles, name)
        keys = [key for key, value in module._parameters.items() if value is not None]
        for key in keys:
            _distribute(module, key, mesh, style.placement(key), device, replaced)
        entrance = None
        if styles.get(name) == "colwise":
            entrance = entrances.get(name.rpartition(".")[0])
        region = Region(mesh.get_group(), sequence and not name.startswith(whole), entrance)
        sums = style.partial or (region.sequence and style.sequence)
        # A row-wise weight sees the whole sequence; its bias is added to a shard of it.
        partial = frozenset(key for key in keys if sums and style.placement(key) != Shard(1))
        run = RUNS.get(styles.get(name, ""), _own)
        module.forward = _Forward(run, region, module, module.forward, partial)


def _entrances(styles: Mapping[str, str]) -> dict[str, Entrance]:
    """Return an entrance for each module with several column-wise layers, by its name."""
    siblings: dict[str, list[str]] = {}
    for name, style_name in styles.items():
        if style_name == "colwise":
            siblings.setdefault(name.rpartition(".")[0], []).append(name)
    return {owner: Entrance(len(names)) for owner, names in siblings.items() if len(names) > 1}


def partial_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ids of parameters whose gradients are summed over the tensor-parallel ranks."""
    return frozenset(
        id(module._parameters[key])
        for module in model.modules()
        if isinstance(module.forward, _Forward)
        for key in module.forward.partial
    )


def _distribute(
    module: nn.Module,
    key: str,
    mesh: DeviceMesh,
    placement: Placement,
    device: torch.device,
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    """Replace parameter ``key`` of a module by a DTensor, tied ones by the same DTensor."""
    parameter = module._parameters[key]
    assert parameter is not None
    if id(parameter) not in replaced:
        whole = torch.empty_like(parameter.detach(), device="meta")
        sharded: Tensor = distribute_tensor(
            whole, mesh, [placement], src_data_rank=None
        )  # sends nothing
        if device.type != "meta":
            sharded = torch.empty_like(sharded, device=device)
        new_parameter = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        carry_over(parameter._backward_hooks, new_parameter)
        replaced[id(parameter)] = parameter, new_parameter
    module._parameters[key] = replaced[id(parameter)][1]
