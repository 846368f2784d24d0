"""Gradient clipping over layouts: where gradients live, what they measure, and one file a mode."""

from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode, build
from runner.clip.norm import limit_norm
from runner.clip.norms import total_norm
from runner.clip.shard import ParamShard
from runner.clip.skip import SkipRule
from runner.clip.transfer import Number
from runner.clip.units import Units
from runner.config.modes import ModeInfo

__all__ = [
    "ClipMode",
    "Decision",
    "GradStats",
    "Layout",
    "ModeInfo",
    "Number",
    "ParamShard",
    "Parts",
    "SkipRule",
    "Units",
    "build",
    "limit_norm",
    "total_norm",
]
