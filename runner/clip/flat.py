"""What clipping asks of a buffer that holds the gradients of many small parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from runner.clip.shard import ParamShard


class FlatBuffer(Protocol):
    """A buffer of gradients, see :class:`runner.booster.flat_gradients.FlatGradients`."""

    def parts(self, *, writes: bool = False) -> list[Tensor] | None:
        """Return tensors that together hold all gradients, each element once, besides zeros.

        Args:
            writes: whether they will be changed, which has to change the gradients.

        Returns:
            The tensors; None where gradients have to be looked at one by one.
        """

    def unmatched(self) -> Sequence[ParamShard]:
        """Return the shards whose gradient may have other strides than the parameter."""
