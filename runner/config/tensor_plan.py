"""The former place of some names."""

from runner.config.plugin_section import EXPERT_STYLES, STYLES

__all__ = ["EXPERT_STYLES", "STYLES"]
