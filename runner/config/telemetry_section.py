"""The former place of some names."""

from runner.config.sections import Telemetry

__all__ = ["Telemetry"]
