"""Section ``telemetry``: what is measured besides the usual metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import Field

from runner.config.clip_section import Clip
from runner.config.plugin_section import PluginSection
from runner.config.section import Conflict, Section
from runner.config.values import Natural


class Telemetry(Section):
    """What is measured besides the usual metrics."""

    per_layer: bool = Field(
        description="log the gradient norm of each parameter, to find the layer that spikes"
    )
    # With defaults: runs that were recorded earlier lack them.
    worst_layers: Natural = Field(
        default=0,
        description="log the shares of ‖G‖² of so many parameters, those with the largest; 0: none",
    )
    update_ratio: bool = Field(
        default=False,
        description="log the norm of each update over that of the weights; a copy of the weights",
    )
    clip_cosine: bool = Field(
        default=False,
        description="log the cosine between the gradient before and after clipping; modes that "
        "clip elements or units need a copy of the gradient",
    )
    noise_scale: bool = Field(
        default=False,
        description="estimate the gradient noise scale from microbatches and data-parallel ranks",
    )
    spike_score: bool = Field(
        default=False, description="log the shares of steps whose loss, or norm, is a spike"
    )
    spike_sigma: float = Field(
        default=6.0,
        gt=0,
        description="a spike is more standard deviations than this away from the rolling mean",
    )
    spike_window: int = Field(
        default=128, ge=4, description="take the rolling mean over so many steps before"
    )
    probe: int = Field(
        ge=0, description="print this many elements of the first parameter after each microbatch"
    )

    def conflicts_with(
        self, plugin: PluginSection, clip: Clip, microbatches: int
    ) -> Iterator[Conflict]:
        """Yield measurements that are not possible beside other sections."""
        if self.worst_layers and clip.norm_type == math.inf:
            message = "needs a norm that parameters have a share of: clip.norm_type=2, not inf"
            yield Conflict("worst_layers", message)
        if not self.noise_scale:
            return
        if {plugin.tp_size, plugin.pp_size, plugin.ep_size} != {1}:
            message = (
                "needs ranks that have the whole gradient of their samples: plugin=single, ddp, "
                f"fsdp or zero, not plugin={plugin.name}"
            )
            yield Conflict("noise_scale", message)
        elif plugin.name == "single" and microbatches == 1:
            message = (
                "compares parts of a batch, and this run has one: accumulation.steps=2 or more, or "
                "plugin=ddp"
            )
            yield Conflict("noise_scale", message)
