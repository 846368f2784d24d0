"""Expert parallelism: the experts of each mixture layer are dealt to ranks.

A mixture is any module with a ``ModuleList`` called ``experts`` and a method ``spread(group)``,
which keeps this rank's share of them, and sends tokens to and fro from then on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers of ``model`` whose experts can be spread, with their names."""
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.ModuleList) and callable(getattr(module, "spread", None)):
            yield name, module


def of_experts(model: nn.Module) -> frozenset[str]:
    """Names of all parameters and buffers that belong to an expert."""
    return frozenset(
        f"{name}.experts.{own}"
        for name, module in mixtures(model)
        for experts in [module.get_submodule("experts")]
        for own, _ in (*experts.named_parameters(), *experts.named_buffers())
    )


def spread_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leave each rank of ``group`` its share of the experts of every mixture."""
    for _, module in list(mixtures(model)):
        experts = list(module.get_submodule("experts").children())
        held = [expert for expert in experts if next(expert.parameters(), None) is not None]
        module.spread(group)  # type: ignore[operator]
        for expert in held:
            if next(expert.parameters(), None) is None:  # it lives on another rank
                for part in expert.modules():
                    part._buffers.update(dict.fromkeys(part._buffers))
