"""Measurements of a step of which each rank has a share: layers, updates, how the gradient turned.

All of them lie in one vector of a step, which stays on the device. The vectors of many steps are
combined over ranks in one collective, when metrics travel to the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.clip import Layout, transfer
from runner.clip.direction import cosine
from runner.clip.norms import Powers
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.layer_norms import LayerNorms
from runner.telemetry.options import Measurements
from runner.telemetry.updates import Updates
from runner.telemetry.worst_layers import WorstLayers


class Clipped(Protocol):
    """What a boosted optimizer knows of the gradients that it clipped last."""

    powers: Powers | None
    direction: Tensor | None


class Gauges:
    """Takes the measurements of steps, and makes metrics from them."""

    def __init__(
        self, layout: Layout, norm_type: float, per_layer: bool, options: Measurements
    ) -> None:
        count = options.worst_layers
        self._layout, self._per_layer = layout, per_layer
        self._worst = WorstLayers(layout.names, count, norm_type) if count else None
        each = per_layer or self._worst is not None
        self.reads = {"each": each, "direction": options.clip_cosine}
        self._turns = options.clip_cosine
        self._norms = LayerNorms(layout, norm_type) if each else None
        self._updates = Updates(layout) if options.update_ratio else None
        self._begun: list[Tensor] = []
        self._kept: Any = None

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

    def begin(self, clipped: Clipped) -> None:
        """Measure between clipping and the step."""
        self._begun = []
        if self._norms is not None:
            self._begun.append(self._norms.share(clipped.powers))
        if self._turns:
            unknown = transfer.on_device([math.nan] * 3, self._layout.device)
            self._begun.append(unknown if clipped.direction is None else clipped.direction)
        if self._updates is not None:
            self._kept = self._updates.keep()

    def end(self) -> Tensor:
        """Return this rank's share of all measurements, [values], on the device, after the step."""
        found, self._begun = self._begun, []
        if self._updates is not None:
            found.append(self._updates.share(self._kept).flatten())
            self._kept = None
        return torch.cat(found)

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps, [steps, values]; one collective."""
        stacked = torch.stack(shares)
        every = self._layout.rows_of_ranks(stacked.flatten()).view(-1, *stacked.shape)
        total = every.sum(0)
        if self._norms is not None:
            layers = slice(len(self._layout.names))
            total[:, layers] = self._norms.combined(every[..., layers])
        return total

    def row(self, values: Sequence[float], taken: bool) -> Row:
        """Return the metrics of a row, and count them for the summary."""
        names, given, row = self._layout.names, iter(values), Row()
        if self._norms is not None:
            norms = list(islice(given, len(names)))
            if self._per_layer:
                row |= self._norms.row(norms, taken)
            if self._worst is not None:
                row |= self._worst.row(norms)
        if self._turns:
            turned = cosine(list(islice(given, 3)))
            if taken and turned is not None:
                row[keys.CLIP_COSINE] = turned
        if self._updates is not None:
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
