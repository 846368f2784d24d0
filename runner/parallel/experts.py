"""Expert parallelism: each rank holds some of the experts of each mixture layer.

A mixture is any module with a ``ModuleList`` called ``experts`` and a method ``spread(group)``,
which keeps only the experts of this rank, and from then on exchanges tokens with the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.ModuleList) and callable(getattr(module, "spread", None)):
            yield name, module


def stacked_experts(model: nn.Module) -> list[str]:
    """Return the modules whose experts are slices of one parameter, as those of transformers."""
    return [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
        and any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]


def of_experts(model: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{name}.experts.{own}"
        for name, module in mixtures(model)
        for experts in [module.get_submodule("experts")]
        for own, _ in (*experts.named_parameters(), *experts.named_buffers())
    )


def split_parameters(
    model: nn.Module, experts: frozenset[str]
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    named = dict(model.named_parameters())
    expert = {name: named.pop(name) for name in list(named) if name in experts}
    return named, expert


def spread_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Keep on each rank of ``group`` only its experts of every mixture."""
    for _, module in list(mixtures(model)):
        experts = list(module.get_submodule("experts").children())
        held = [expert for expert in experts if next(expert.parameters(), None) is not None]
        module.spread(group)  # type: ignore[operator]
        for expert in held:
            if next(expert.parameters(), None) is None:  # it lives on another rank
                for part in expert.modules():
                    part._buffers.update(dict.fromkeys(part._buffers))
