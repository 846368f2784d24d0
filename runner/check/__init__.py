"""Checks of anyone's clipping and accumulation, in the middle of a training run."""

from runner.check.accumulation import AccumulationCheck, AccumulationError, check_accumulation
from runner.check.clipping import ClippingCheck, ClippingError, check_clipping

__all__ = [
    "AccumulationCheck",
    "AccumulationError",
    "ClippingCheck",
    "ClippingError",
    "check_accumulation",
    "check_clipping",
]
