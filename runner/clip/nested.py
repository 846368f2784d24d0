"""What modes that hold other modes have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from runner.clip.decision import Decision, Inner
from runner.clip.layout import Layout, OptionError
from runner.clip.mode import ClipMode, build
from runner.clip.norms import combine
from runner.clip.transfer import Number
from runner.config.modes import Mode, arguments_of, kind_of, problems, written_out
from runner.config.problem import NOTHING


def made(where: str, given: Any, outer: Mode, **options: Any) -> ClipMode:
    """Make a mode inside of another one."""
    for key, message, _ in problems(where, given, options):
        raise ValueError(f"{key}: {message}")
    node = written_out(given)
    shared = {"norm_type": outer.norm_type, "scales": outer.scales}
    return build(kind_of(node), **arguments_of(node), **options, **shared)


def bind(mode: ClipMode, layout: Layout, where: str) -> None:
    """Bind a mode inside of another one."""
    try:
        mode.bind(layout)
    except OptionError as error:
        option = f"{where}.{error.option}"
        value = getattr(mode, error.option) if error.value is NOTHING else error.value
        message = str(error).replace(f"clip.{error.option}", f"clip.{option}")
        raise OptionError(option, message, value) from None


def together(
    norm: Number,
    after: Number,
    inner: Sequence[Inner],
    *,
    coef: Number | None = None,
    scales: Tensor | None = None,
    fraction: Number | None = None,
) -> Decision:
    """Return the decision that several modes come to.

    It has no λ of its own, and no value that is compared with one.
    """
    nan = math.nan
    clipped = combine([each.decision.clipped for each in inner], math.inf)
    share = clipped if fraction is None else fraction
    if isinstance(norm, Tensor):
        ratio = (after / norm).nan_to_num(nan=1.0) if coef is None else coef
    elif clipped == 0.0:
        # The same number twice, not a quotient of two that were rounded differently.
        after, ratio, scales = norm, 1.0, None
    else:
        ratio = after / norm if coef is None else coef
    return Decision(norm, after, ratio, clipped, share, nan, nan, scales=scales, inner=tuple(inner))


def state_of(modes: Mapping[str, ClipMode]) -> dict[str, Any]:
    """Return the state of each mode by its name, with that of its class."""
    return {
        name: {"class": type(mode).__name__, **mode.state_dict()} for name, mode in modes.items()
    }


def load_states(modes: Mapping[str, ClipMode], states: Mapping[str, Any]) -> None:
    """Load what :func:`state_of` returned; a mode of another class begins anew."""
    for name, mode in modes.items():
        given = states.get(name, {})
        if given.get("class") == type(mode).__name__:
            mode.load_state_dict(given)
