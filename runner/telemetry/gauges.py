"""Measurements of a step of which each rank has a share: layers, updates, how the gradient turned.

All of them lie in one vector of a step, which stays on the device. The vectors of many steps are
combined over ranks in one collective, when metrics travel to the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from runner.clip import Layout, ParamShard, transfer
from runner.clip.decision import cosine
from runner.clip.norms import Powers, combined_norms, powers_of
from runner.config.sections import Telemetry
from runner.run_folder import keys
from runner.run_folder.rows import Row


@dataclass(frozen=True)
class Measurements:
    """Optional measurements; none by default. The values are those of rows (``log.interval``).

    Attributes:
        worst_layers: log the share of ‖G‖² of so many parameters, those with the largest. The
            summary lists the parameters that had the largest shares over the run.
        update_ratio: log ‖ΔW‖ ÷ ‖W‖, with W the weights before a step and ΔW what the step added.
            Where layer norms are logged, that of each parameter too. Takes a copy of the weights.
        clip_cosine: log the cosine of the angle between the gradient before and after clipping. A
            mode that clips elements or units takes a copy of the gradient for it.
        noise_scale: estimate the gradient noise scale, see :mod:`runner.telemetry.statistics`.
        spike_score: log the share of the steps so far whose loss, and gradient norm, is a spike,
            see :mod:`runner.telemetry.statistics`. Every step counts.
        spike_sigma: number of standard deviations from the mean beyond which a value is a spike.
        spike_window: number of values that the mean is over.
    """

    worst_layers: int = 0
    update_ratio: bool = False
    clip_cosine: bool = False
    noise_scale: bool = False
    spike_score: bool = False
    spike_sigma: float = 6.0
    spike_window: int = 128

    @classmethod
    def of(cls, section: Telemetry) -> Self:
        """Return what the section ``telemetry`` of a configuration asks for."""
        return cls(**{one.name: getattr(section, one.name) for one in fields(cls)})


class Gauges:
    """Takes the measurements of steps, and makes metrics from them."""

    def __init__(
        self,
        layout: Layout,
        norm_type: float = 2.0,
        per_layer: bool = False,
        options: Measurements | None = None,
    ) -> None:
        self._layout, self._norm_type, self._per_layer = layout, norm_type, per_layer
        options = options or Measurements()
        count = options.worst_layers
        self._worst = WorstLayers(layout.names, count, norm_type) if count else None
        self._each, self._turns = per_layer or count > 0, options.clip_cosine
        self.reads = {"each": self._each, "direction": self._turns}
        self._updates = options.update_ratio
        self._begun: list[Tensor] = []
        self._shards: list[ParamShard] = []
        self._weights: list[Tensor] = []

    @classmethod
    def of(
        cls, layout: Layout, norm_type: float, per_layer: bool, options: Measurements
    ) -> Gauges | None:
        """Return the gauges that are asked for, None for none."""
        asked = per_layer or options.worst_layers or options.update_ratio or options.clip_cosine
        return cls(layout, norm_type, per_layer, options) if asked else None

    @property
    def spans_ranks(self) -> bool:
        """Whether :meth:`over_ranks` needs the other ranks."""
        return self._layout.group is not None

    @torch.no_grad()
    def begin(self, powers: Powers | None, direction: Tensor | None = None) -> None:
        """Measure between clipping and the step, given what clipping has measured."""
        self._begun = []
        if self._each:
            assert powers is not None
            assert powers.norm_type == self._norm_type
            self._begun.append(powers.of_parameters(self._layout))
        if self._turns:
            unknown = transfer.on_device([math.nan] * 3, self._layout.device)
            self._begun.append(unknown if direction is None else direction)
        if self._updates:
            trained = [s for s in self._layout.shards if s.param.requires_grad]
            self._shards = [shard for shard in trained if shard.weight.numel()]
            self._weights = [shard.weight.clone() for shard in self._shards]

    @torch.no_grad()
    def end(self) -> Tensor:
        """Return this rank's share of all measurements, [values], on the device, after the step."""
        found, self._begun = self._begun, []
        if self._updates:
            before = self._squares(self._weights)
            # Updates are differences of weights, so whatever optimizer made them.
            torch._foreach_sub_(self._weights, [shard.weight for shard in self._shards])
            found += [self._squares(self._weights), before]
            self._shards, self._weights = [], []
        return torch.cat(found)

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps, [steps, values]; one collective."""
        stacked = torch.stack(shares)
        every = self._layout.rows_of_ranks(stacked.flatten()).view(-1, *stacked.shape)
        total = every.sum(0)
        if self._each:
            layers = slice(len(self._layout.names))
            total[:, layers] = combined_norms(every[..., layers], self._norm_type)
        return total

    def row(self, values: Sequence[float], taken: bool) -> Row:
        """Return the metrics of a row, and count them for the summary."""
        names, given, row = self._layout.names, iter(values), Row()
        if self._each:
            norms = list(islice(given, len(names)))
            if self._per_layer:
                row |= {keys.LAYER_NORM + name: n for name, n in zip(names, norms, strict=True)}
            if self._worst is not None:
                row |= self._worst.row(norms)
        if self._turns:
            turned = cosine(list(islice(given, 3)))
            if taken and turned is not None:
                row[keys.CLIP_COSINE] = turned
        if self._updates:
            updates, weights = (list(islice(given, len(names))) for _ in range(2))
            each = zip(names, updates, weights, strict=True) if self._per_layer else ()
            row |= {keys.LAYER_UPDATE + name: math.sqrt(u / w) for name, u, w in each if w > 0}
            if (size := math.fsum(weights)) > 0:
                row[keys.UPDATE_RATIO] = math.sqrt(math.fsum(updates) / size)
        return row

    def summary(self) -> dict[str, Any]:
        """Return what all rows so far came to."""
        return {} if self._worst is None else {keys.WORST_LAYERS: self._worst.summary()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the summary depends on."""
        return {} if self._worst is None else {"worst": self._worst.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may be that of other options."""
        if self._worst is not None and "worst" in state:
            self._worst.load_state_dict(state["worst"])

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the squared norm of each parameter, [parameters]."""
        powers = powers_of(self._shards, tensors, 2.0, each=True)[1]
        assert powers is not None
        return powers.of_parameters(self._layout)


class WorstLayers:
    """Finds the parameters with the largest shares of ‖G‖²: in each row, and over the run."""

    def __init__(self, names: Sequence[str], count: int, norm_type: float) -> None:
        if math.isinf(norm_type):
            raise ValueError("worst_layers needs a norm with shares: norm_type 2, say, not inf")
        self._names, self._count, self._norm_type = names, count, norm_type
        # Rows: sum of shares, largest norm, times that the parameter came first.
        self._columns, self._rows = np.zeros((3, len(names))), 0

    def row(self, norms: Sequence[float]) -> Row:
        """Return the largest shares by parameter, and count all of them for the summary."""
        each = np.array(norms)
        largest = each.max(initial=0.0)
        if not (np.isfinite(each).all() and largest > 0.0):
            return {}
        powers = (each / largest) ** self._norm_type
        shares = powers / powers.sum()
        worst = _largest(shares, self._count)
        self._columns[0] += shares
        self._columns[1] = np.maximum(self._columns[1], each)
        self._columns[2, worst[0]] += 1
        self._rows += 1
        return {keys.LAYER_SHARE + self._names[i]: float(shares[i]) for i in worst}

    def summary(self) -> list[dict[str, Any]]:
        """Return the parameters with the largest mean shares, the largest first."""
        (shares, norms, first), rows = self._columns.tolist(), max(self._rows, 1)
        return [
            {
                "parameter": self._names[i],
                "share": shares[i] / rows,
                "largest_norm": norms[i],
                "first": first[i] / rows,
            }
            for i in _largest(self._columns[0], self._count if self._rows else 0)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"columns": torch.from_numpy(self._columns.copy()), "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._columns, self._rows = state["columns"].numpy().copy(), state["rows"]


def _largest(values: np.ndarray[Any, Any], count: int) -> list[int]:
    """Return the positions of the largest values, the largest first; of equal ones the first."""
    order: list[int] = np.argsort(-values, kind="stable")[:count].tolist()
    return order
