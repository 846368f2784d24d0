"""Which parameters hold most of the gradient: in each row, and over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from runner.run_folder import keys
from runner.run_folder.rows import Row


class WorstLayers:
    """Finds the parameters with the largest shares of ‖G‖²."""

    def __init__(self, names: Sequence[str], count: int, norm_type: float) -> None:
        if norm_type == np.inf:
            raise ValueError("worst_layers needs a norm with shares: norm_type 2, say, not inf")
        self._names, self._count, self._norm_type = names, count, norm_type
        self._shares = np.zeros(len(names))
        self._norms = np.zeros(len(names))
        self._first = np.zeros(len(names))
        self._rows = 0

    def row(self, norms: Sequence[float]) -> Row:
        """Return the largest shares by the keys of their parameters, and count all for the
        summary.
        """
        each = np.array(norms)
        largest = each.max(initial=0.0)
        if not (np.isfinite(each).all() and largest > 0.0):
            return {}
        powers = (each / largest) ** self._norm_type
        shares = powers / powers.sum()
        worst = _largest(shares, self._count)
        self._shares += shares
        np.maximum(self._norms, each, out=self._norms)
        self._first[worst[0]] += 1
        self._rows += 1
        return {keys.LAYER_SHARE + self._names[i]: float(shares[i]) for i in worst}

    def summary(self) -> list[dict[str, Any]]:
        """Return the parameters with the largest mean shares, the largest first."""
        rows = max(self._rows, 1)
        return [
            {
                "parameter": self._names[i],
                "share": float(self._shares[i]) / rows,
                "largest_norm": float(self._norms[i]),
                "first": float(self._first[i]) / rows,
            }
            for i in _largest(self._shares, self._count if self._rows else 0)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        columns = np.stack([self._shares, self._norms, self._first])
        return {"columns": torch.from_numpy(columns), "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._shares, self._norms, self._first = state["columns"].numpy().copy()
        self._rows = state["rows"]


def _largest(values: np.ndarray[Any, Any], count: int) -> list[int]:
    """Return the positions of the largest values, the largest first; of equal ones the first."""
    order: list[int] = np.argsort(-values, kind="stable")[:count].tolist()
    return order
