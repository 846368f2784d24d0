"""The former place of some names."""

from runner.config.schema import not_measured, refusals

__all__ = ["not_measured", "refusals"]
