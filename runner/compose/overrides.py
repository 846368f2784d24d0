"""The former place of some names."""

from runner.compose.jobs import key_of, spelled_out

__all__ = ["key_of", "spelled_out"]
