"""What clipping does depends on how the optimizer uses the gradient afterwards.

| kind | optimizers | effect of scaling every gradient by the same factor |
|---|---|---|
| plain | SGD, ASGD, L-BFGS | the step is scaled by that factor |
| normalized | Adam and its kin, RMSprop, Adagrad, Adafactor, LAMB, LARS, SOAP | none (*) |
| orthogonalized | Muon | none on matrices (*); mode ``norm`` leaves them out by default |
| sign | Lion, Signum | none; clipped gradients weigh less in the momentum |
| sign only | signSGD, Rprop, Signum without momentum | none; clipping changes no step |

(*) while the constant that is added to the divisor is small beside the gradient. Muon has one for
each matrix: a coefficient that other gradients made small can push it below the constant, and the
matrix then hardly moves. Adafactor also limits the RMS of its own update.

Sources: Adam (arXiv 1412.6980, section 2.1), Adafactor (1804.04235), Lion (2302.06675,
algorithm 2), signSGD and Signum (1802.04434), Muon (https://kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

NEGLIGIBLE = 0.1
"""A constant in a divisor is negligible below this share of what it is added to."""

FLOAT32_EPS = 2.0**-23
"""Least divisor of :class:`torch.optim.Adafactor` for float32 parameters, where ``eps`` is None."""

Kind = Literal["plain", "normalized", "sign", "sign only", "orthogonalized"]

_KINDS: dict[Kind, str] = {
    # Muon first: some implementations have Adam in their names for the parameters left over.
    "orthogonalized": "muon",
    "sign only": "rprop",
    "sign": "lion|signum|signsgd|tiger",
    "normalized": "adam|adan|adafactor|adagrad|adadelta|adabelief|adabound|rmsprop|lamb|lars"
    "|novograd|yogi|came|soap|shampoo|prodigy|sophia|apollo",
}
"""Patterns for the lower-case class names of optimizers; the first match counts."""


@dataclass(frozen=True)
class Effect:
    """How an optimizer uses the size of a gradient."""

    name: str
    kind: Kind
    floor: bool = False
    """Whether the constant in the divisor is not negligible at the threshold, so that the size of
    the gradient matters although the optimizer is of a kind that divides by it."""
    left_out: str = ""  # class name of an optimizer beside it whose gradients are not scaled

    @property
    def scales(self) -> bool:
        """Whether a smaller gradient makes a smaller step."""
        return self.kind == "plain" or self.floor


PLAIN = Effect("SGD", "plain")
"""The effect of an optimizer that multiplies the gradient by its learning rate."""


def effect_of(
    optimizers: Sequence[Optimizer],
    threshold: float | None,
    parameters: int,
    leaves_out: bool = False,
) -> Effect:
    """Return how optimizers that step together use the size of a gradient held to ``threshold``.

    If the kinds differ, one that scales its steps with the gradient takes precedence.
    """
    effects = [_effect(optimizer, threshold, parameters) for optimizer in optimizers]
    if leaves_out:
        left_out = [effect for effect in effects if effect.kind == "orthogonalized"]
        others = [effect for effect in effects if effect.kind != "orthogonalized"]
        if left_out and others:
            return replace(_together(others), left_out=left_out[0].name)
    return _together(effects)


def _together(effects: Sequence[Effect]) -> Effect:
    scaling = [effect for effect in effects if effect.scales]
    first, *others = scaling or effects
    if all(other.kind == first.kind for other in others):
        return first
    names = " with ".join(effect.name for effect in (first, *others))
    return Effect(names, "plain" if scaling else "normalized", any(e.floor for e in scaling))


def _effect(optimizer: Optimizer, threshold: float | None, parameters: int) -> Effect:
    name = type(optimizer).__name__
    lower = name.lower()
    kind: Kind = next((each for each, known in _KINDS.items() if re.search(known, lower)), "plain")
    options = optimizer.defaults
    if kind == "sign" and "lion" not in lower and not _momentum(options):
        kind = "sign only"
    constant = _constant(optimizer) if kind in ("normalized", "orthogonalized") else 0.0
    size = math.inf if threshold is None else threshold
    # Orthogonalization divides by the norm of a matrix, the others divide each element.
    matrices = sum(len(group["params"]) for group in optimizer.param_groups)
    parts = matrices if kind == "orthogonalized" else parameters
    return Effect(name, kind, constant > NEGLIGIBLE * size / math.sqrt(max(parts, 1)))


def _constant(optimizer: Optimizer) -> float:
    """Return what is added to the divisor: ``eps``, and the root of Adagrad's initial sum."""
    options = optimizer.defaults
    eps = options.get("eps") or 0.0
    if isinstance(eps, tuple | list):
        if type(optimizer).__module__.startswith("torch."):
            eps = FLOAT32_EPS if eps[0] is None else eps[0]  # the least divisor itself
        else:
            eps = math.sqrt(eps[0] or 0.0)  # Adafactor: the first is added to the squared gradient.
    return float(eps) + math.sqrt(float(options.get("initial_accumulator_value") or 0.0))


def _momentum(options: dict[str, Any]) -> bool:
    """Return whether an optimizer keeps a mean of earlier gradients; True if unknown."""
    known = [options[key] for key in ("momentum", "beta", "betas") if key in options]
    return not known or any(bool(value) for value in known)
