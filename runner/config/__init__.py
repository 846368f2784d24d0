"""What a run is asked to be: typed, checked, and composed from words.

This package imports nothing else of `runner`, and never torch.
"""

from runner.config.check import parse
from runner.config.duration import Duration
from runner.config.problem import Problem, RequestError
from runner.config.schema import RunConfig

__all__ = ["Duration", "Problem", "RequestError", "RunConfig", "parse"]
