"""The former place of some names."""

from runner.config.plugin_section import SCHEDULES, refused_microbatches

__all__ = ["SCHEDULES", "refused_microbatches"]
