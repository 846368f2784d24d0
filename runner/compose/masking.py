"""The former place of some names."""

from runner.compose.record import recorded_words, resolved_and_recorded, write_composition

__all__ = ["recorded_words", "resolved_and_recorded", "write_composition"]
