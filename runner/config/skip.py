"""Options of the rule that skips a step whose loss or gradient norm is a spike, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runner.config.problem import did_you_mean, or_list

RULES = ("sigma", "ema")
OF = ("norm", "loss", "either")

ACCEPT_AFTER = 20
"""Skips in a row after which a higher level counts as the new one, by default."""

WINDOW = 128
"""Number of kept steps that ``sigma`` compares with by default."""

_K = {"sigma": 6.0, "ema": 20.0}


@dataclass(eq=False)
class SkipOptions:
    """When an optimizer step is skipped because a value of it is a spike."""

    rule: str = "sigma"
    of: str = "norm"
    k: float | None = None
    window: int | None = None
    decay: float | None = None
    min_steps: int | None = None
    accept_after: int | None = ACCEPT_AFTER

    def __post_init__(self) -> None:
        for name, message in problems(vars(self)):
            raise ValueError(f"{name}={getattr(self, name)} of a skip rule {message}")
        self.k = _K[self.rule] if self.k is None else self.k
        if self.rule == "sigma":
            self.window = WINDOW if self.window is None else self.window
            shortest = max(2, self.window // 2)
        else:
            self.decay = 0.99 if self.decay is None else self.decay
            shortest = max(1, round(1 / (1 - self.decay)))
        self.min_steps = shortest if self.min_steps is None else self.min_steps

    @property
    def of_what(self) -> str:
        """The value that the rule judges, for messages."""
        names = {"norm": "norm of the gradient", "loss": "loss"}
        return names.get(self.of, "loss or the norm of the gradient")


def problems(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options that cannot be, each with why, before defaults are filled in."""
    for name, allowed in (("rule", RULES), ("of", OF)):
        if given[name] not in allowed:
            yield name, f"must be {or_list(allowed)}{did_you_mean(given[name], allowed)}"
    decay, window, accept_after = given["decay"], given["window"], given["accept_after"]
    if given["k"] is not None and not given["k"] > 0:
        yield "k", "must be above 0"
    if accept_after is not None and accept_after < 1:
        yield "accept_after", "must be at least 1, or null for never"
    if given["rule"] == "sigma":
        if decay is not None:
            yield "decay", "goes with the rule ema; the memory of sigma is its window"
        if window is not None and window < 2:
            yield "window", "must be at least 2"
        most = WINDOW if window is None else window
        if given["min_steps"] is not None and not 2 <= given["min_steps"] <= most:
            yield "min_steps", f"must be from 2 to the window of {most} steps"
    else:
        if window is not None:
            yield "window", "goes with the rule sigma; the memory of ema is its decay"
        if decay is not None and not 0 < decay < 1:
            yield "decay", "must be above 0 and below 1"
        if given["min_steps"] is not None and given["min_steps"] < 1:
            yield "min_steps", "must be at least 1"
