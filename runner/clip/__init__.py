"""Gradient clipping: the contract of a mode, one file a mode, and one call for any loop."""

from runner.clip.decision import Change, Decision, GradStats
from runner.clip.functional import (
    GradientClipping,
    apply_gradient_clipping,
    clipping_state_dict,
    load_clipping_state_dict,
)
from runner.clip.mode import ChangeMode, ClipMode, build
from runner.clip.norm import limit_norm
from runner.clip.skip import SkipRule
from runner.config.modes import ModeInfo
from runner.gradients.layout import Layout
from runner.gradients.norms import total_norm
from runner.gradients.shard import ParamShard
from runner.gradients.units import Units

__all__ = [
    "Change",
    "ChangeMode",
    "ClipMode",
    "Decision",
    "GradStats",
    "GradientClipping",
    "Layout",
    "ModeInfo",
    "ParamShard",
    "SkipRule",
    "Units",
    "apply_gradient_clipping",
    "build",
    "clipping_state_dict",
    "limit_norm",
    "load_clipping_state_dict",
    "total_norm",
]
