"""The former place of some names."""

from runner.config.folders import read_yaml

__all__ = ["read_yaml"]
