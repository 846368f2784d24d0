"""The gradient norm of every parameter, for the rows that log it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.clip import Layout
from runner.clip.norms import Powers, combined_norms, parameter_norms
from runner.run_folder import keys
from runner.run_folder.rows import Row


@dataclass(frozen=True)
class LayerNorms:
    """Measures the norm of each parameter's gradient without waiting for the device."""

    layout: Layout
    norm_type: float = 2.0

    @property
    def keys(self) -> list[str]:
        """Metric key of each parameter, in the order of the values."""
        return [keys.layer_norm(name) for name in self.layout.names]

    @property
    def spans_ranks(self) -> bool:
        """Whether :meth:`over_ranks` needs the other ranks."""
        return self.layout.group is not None

    def share(self, powers: Powers | None) -> Tensor:
        """Return this rank's share of the norm of each parameter, [parameters], on the device."""
        assert powers is not None
        assert powers.norm_type == self.norm_type
        return powers.of_parameters(self.layout)

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps into norms, [steps, parameters]; one collective."""
        return parameter_norms(self.layout, torch.stack(shares), self.norm_type)

    def combined(self, every: Tensor) -> Tensor:
        """Return norms, [steps, parameters], given the shares of all ranks, [ranks, ...]."""
        return combined_norms(every, self.norm_type)

    def row(self, values: Sequence[float], taken: bool = True) -> Row:
        """Return the metrics of a row, given the norm of each parameter."""
        return dict(zip(self.keys, values, strict=True))

    def summary(self) -> dict[str, Any]:
        """Return nothing: norms of layers are metrics of rows alone."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rows do not depend on earlier ones."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""
