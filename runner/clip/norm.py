"""Modes ``norm`` and ``none``: G ← G · min(1, λ/‖G‖), with one ‖G‖ over the whole model; and G ← G.

Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, algorithm 1).
"""

from dataclasses import dataclass

from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.clip.transfer import Number
from runner.config.modes import Norm, Unclipped


def limit_norm(
    norm: Number,
    limit: Number,
    *,
    max_stat: Number | None = None,
    threshold: Number | None = None,
    to: Number | None = None,
) -> Decision:
    """Decide to scale the whole gradient so that its norm is at most ``limit``.

    No epsilon is added to ‖G‖: the clipped norm is ``limit`` (or ``to``), and a gradient whose norm
    is exactly ``limit`` is not touched.
    """
    stat = norm if max_stat is None else max_stat
    in_force = limit if threshold is None else threshold
    above = norm > limit  # the host cannot compare tensors of an accelerator without waiting
    if not isinstance(above, Tensor) and not above:
        return Decision.untouched(norm, in_force, stat)
    coef = transfer.where(above, (limit if to is None else to) / norm, 1.0)
    clipped = transfer.where(above, 1.0, 0.0)
    return Decision(norm, norm * coef, coef, clipped, clipped, stat, in_force)


@dataclass(eq=False)
class NormClip(Norm, ClipMode):
    """Scale the whole gradient so that its norm is at most λ."""

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        return limit_norm(stats.norm, self.limit)  # no collective: every rank has the same ‖G‖


@dataclass(eq=False)
class NoClip(Unclipped, ClipMode):
    """Leave the gradients alone; everything is still measured."""

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        return Decision.untouched(stats.norm, None, stats.norm)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        return decision
