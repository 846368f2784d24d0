"""What every clipping mode is: options, a layout it is bound to, and one call a step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout, Number
from runner.clip.norms import combine, local_power
from runner.clip.tally import Tally


class Outcome(NamedTuple):
    """What clipping did in one step. Floats on a CPU, 0-dimensional tensors on an accelerator.

    Attributes:
        norm: ‖G‖ before clipping, of the synchronised, unscaled, normalised gradient.
        norm_clipped: ‖G‖ after clipping.
        coef: norm_clipped ÷ norm, 1 where nothing was clipped.
        clipped: 1 if the step changed anything, else 0.
        fraction: share clipped of what the mode clips: the step, the elements, or the units.
        peak: what the mode compares with λ, at its largest: ‖G‖, |g| of an element, or
            ‖G_u‖/max(‖W_u‖, ε) of a unit. A threshold below it would have clipped this step.
        threshold: λ in force, NaN where the mode has none.
    """

    norm: Number
    norm_clipped: Number
    coef: Number
    clipped: Number
    fraction: Number
    peak: Number
    threshold: float

    @classmethod
    def untouched(cls, norm: Number, threshold: float | None, peak: Number) -> Outcome:
        """Measured, and left as it is."""
        return cls(norm, norm, 1.0, 0.0, 0.0, peak, math.nan if threshold is None else threshold)

    @classmethod
    def skipped(cls, norm: Number, threshold: float | None) -> Outcome:
        """A step that was not taken because its gradient is not finite."""
        nan = math.nan
        return cls(norm, nan, nan, 0.0, 0.0, nan, nan if threshold is None else threshold)

    def unless(self, finite: Tensor) -> Outcome:
        """Return this outcome where ``finite`` holds, else :meth:`skipped`, decided on the device.

        Args:
            finite: 0-dimensional boolean, whether the gradient is finite.
        """
        nan = math.nan
        return self._replace(
            norm_clipped=torch.where(finite, self.norm_clipped, nan),
            coef=torch.where(finite, self.coef, nan),
            clipped=torch.where(finite, self.clipped, 0.0),
            fraction=torch.where(finite, self.fraction, 0.0),
            peak=torch.where(finite, self.peak, nan),
        )


@dataclass
class ClipMode(ABC):
    """One rule of clipping. Subclasses say what it does to the gradients of a layout.

    Args:
        threshold: λ, above 0. It may be moved between steps; each step logs the one in force.
        norm_type: p of the total norm that is measured (and that mode ``norm`` limits).
        exclude: globs of parameter names that the mode leaves alone, or ``"auto"``: the weights of
            the model's heads. Only modes that clip parameter by parameter look at it.
        eps: lower bound of a weight's norm in adaptive clipping.
        units: globs of parameter names, and the dimension or dimensions of these parameters that
            index outputs, for layers that adaptive clipping does not know; of two globs that match
            a parameter the last one counts. Without any dimension the whole tensor is one unit.

    Raises:
        ValueError: a threshold that is not above 0, a norm_type below 1, an eps not above 0, units
            that are no dimensions.
    """

    threshold: float | None = None
    norm_type: float = 2.0
    exclude: tuple[str, ...] | str = "auto"
    eps: float = 1e-3
    units: Mapping[str, int | Sequence[int]] = field(default_factory=dict)

    tally: Tally | None = field(default=None, init=False, repr=False)
    """Counts the elements or units that the mode compares with λ, where it is set."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold > 0:
            raise ValueError(f"the clipping threshold must be above 0, not {self.threshold}")
        if not self.norm_type >= 1:
            raise ValueError(f"norm_type must be at least 1 (or inf), not {self.norm_type}")
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        for pattern, dims in self.units.items():
            listed = dims if isinstance(dims, list | tuple) else [dims]
            if any(type(dim) is not int for dim in listed):
                raise ValueError(
                    f"units of {pattern} must be the dimension that indexes outputs, or a list of "
                    f"dimensions, not {dims!r}"
                )

    @property
    def limit(self) -> float:
        """λ of a mode that cannot do without one.

        Raises:
            ValueError: no threshold was given.
        """
        if self.threshold is None:
            raise ValueError("this clipping mode needs a threshold")
        return self.threshold

    def bind(self, layout: Layout) -> None:  # noqa: B027 (most modes have nothing to prepare)
        """Prepare for ``layout``, once, before the first step.

        Raises:
            ValueError: the options do not fit the layout (a glob that matches nothing).
        """

    @abstractmethod
    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Clip the gradients of ``layout`` in place.

        Args:
            layout: the layout this mode was bound to. Gradients are final: synchronised, unscaled,
                divided by the window's items, and finite.
            norm: their total norm, from :func:`runner.clip.norms.total_norm`.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {"threshold": self.threshold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where :meth:`state_dict` left off."""
        self.threshold = state["threshold"]


def after_counting(
    mode: ClipMode, layout: Layout, norm: Number, changed: Number, of: Number, peak: Number
) -> Outcome:
    """Outcome of a mode that changes parts: counts and the new norm, in one collective.

    Args:
        mode: the mode, for its threshold and norm type.
        layout: with its gradients already clipped.
        norm: ‖G‖ before.
        changed: parts (elements, units) of this rank that were changed, each ÷ its num_replicas.
        of: parts of this rank in all, each ÷ its num_replicas.
        peak: what is compared with λ, at its largest on this rank.
    """
    if mode.tally is not None:
        mode.tally.end_step(norm)
    power = local_power(layout, mode.norm_type)
    powers, changes, parts, peaks = layout.gather([power, changed, of, peak])
    highest = combine(peaks, math.inf)
    if isinstance(norm, Tensor):
        after = combine(powers, mode.norm_type)
        # The ranks' shares of a count add up to it but for rounding.
        counts = transfer.on_device([sum(changes), sum(parts)], norm.device).round()
        fraction = counts[0] / counts[1].clamp(min=1.0)
        coef = (after / norm).nan_to_num(nan=1.0)
        return Outcome(norm, after, coef, fraction.sign(), fraction, highest, mode.limit)
    total, everything = round(float(sum(changes))), round(float(sum(parts)))
    if total == 0:
        # The same value twice, not a quotient of two roundings.
        return Outcome.untouched(norm, mode.limit, highest)
    limited = float(combine(powers, mode.norm_type))
    return Outcome(norm, limited, limited / norm, 1.0, total / everything, highest, mode.limit)
