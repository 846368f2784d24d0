"""The gradient norm of every parameter, for the rows that log it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.clip import Layout
from runner.clip.norms import Powers, parameter_norms
from runner.run_folder import keys


@dataclass(frozen=True)
class LayerNorms:
    """Measures the norm of each parameter's gradient without waiting for the device.

    A step leaves this rank's share on the device. :meth:`over_ranks` combines the shares of many
    steps at once, when metrics travel to the host.

    Args:
        layout: where the gradients are.
        norm_type: p of the norm.
    """

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
        """Return this rank's share of the norm of each parameter, [parameters], on the device.

        Args:
            powers: what clipping measured of the gradients, with the share of each.
        """
        assert powers is not None
        assert powers.norm_type == self.norm_type
        return powers.of_parameters(self.layout)

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps into norms, [steps, parameters]; one collective."""
        return parameter_norms(self.layout, torch.stack(shares), self.norm_type)
