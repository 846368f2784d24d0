"""Where the gradients of a model are, on which ranks, and how large they are."""

from runner.gradients.layout import Layout, OptionError
from runner.gradients.norms import total_norm
from runner.gradients.shard import LayoutError, ParamShard
from runner.gradients.units import Units

__all__ = [
    "Layout",
    "LayoutError",
    "OptionError",
    "ParamShard",
    "Units",
    "total_norm",
]
