"""Kernels of a device: ``host`` on a CPU, else ``plain``, with the same signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from runner.gradients import host, plain, transfer
from runner.gradients.layout import Layout
from runner.gradients.plain import Elements
from runner.gradients.shard import ParamShard


class Kernels(Protocol):
    """Kernels of one device; :mod:`runner.gradients.plain` describes them."""

    TOGETHER: int

    def powers(
        self,
        layout: Layout,
        shards: Sequence[ParamShard],
        gradients: Sequence[Tensor],
        norm_type: float,
        each: bool,
    ) -> tuple[Tensor, Tensor | None]: ...

    def multiply(self, gradients: list[Tensor], coef: Tensor) -> None: ...

    def multiply_each(self, gradients: Sequence[Tensor], coefs: Tensor) -> None: ...

    def compare_elements(self, layout: Layout, limit: float) -> Elements: ...

    def clamp(self, gradients: Sequence[Tensor], limit: float) -> None: ...

    @property
    def UnitKernel(self) -> type[plain.UnitKernel]: ...

    def unit_dtype(self, norm: Tensor, least: float) -> torch.dtype: ...

    def may_hold(self, conditions: Tensor) -> list[bool]: ...


def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of a device."""
    return host if transfer.can_read(device) else plain
