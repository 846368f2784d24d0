"""The former place of some names."""

from runner.compose.jobs import Where, where

__all__ = ["Where", "where"]
