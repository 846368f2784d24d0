"""The former place of some names."""

from runner.compose.record import recorded

__all__ = ["recorded"]
