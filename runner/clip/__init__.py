"""Gradient clipping: the contract of a mode, one file a mode, and one call for any loop."""

from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.mode import ClipMode, build
from runner.clip.norm import limit_norm
from runner.clip.skip import SkipRule
from runner.config.modes import ModeInfo
from runner.gradients.layout import Layout
from runner.gradients.norms import total_norm
from runner.gradients.shard import ParamShard
from runner.gradients.units import Units

__all__ = [
    "ClipMode",
    "Decision",
    "GradStats",
    "Layout",
    "ModeInfo",
    "ParamShard",
    "Parts",
    "SkipRule",
    "Units",
    "build",
    "limit_norm",
    "total_norm",
]
