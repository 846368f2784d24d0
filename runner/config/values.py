"""The former place of some names."""

from runner.config.folders import Refusal

__all__ = ["Refusal"]
