"""Gradient clipping: the contract of a mode, and one file a mode."""

from runner.clip.decision import Change, Decision
from runner.clip.mode import ChangeMode, ClipMode, FactorMode, build
from runner.clip.norm import limit_norm
from runner.clip.skip import SkipRule
from runner.config.modes import ModeInfo
from runner.gradients.layout import Layout
from runner.gradients.norms import Norms, total_norm
from runner.gradients.shard import ParamShard
from runner.gradients.units import Units

__all__ = [
    "Change",
    "ChangeMode",
    "ClipMode",
    "Decision",
    "FactorMode",
    "Layout",
    "ModeInfo",
    "Norms",
    "ParamShard",
    "SkipRule",
    "Units",
    "build",
    "limit_norm",
    "total_norm",
]
