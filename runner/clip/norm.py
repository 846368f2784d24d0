"""Mode ``norm``: G ← G · min(1, λ/‖G‖), with one ‖G‖ over the whole model.

Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, algorithm 1).
"""

from runner.clip.decision import Decision, GradStats
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode
from runner.config.modes.norm import Norm


class NormClip(Norm, ClipMode):
    """Scale the whole gradient so that its norm is at most λ."""

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Compare ‖G‖ with λ; no collective, because every rank has the same ‖G‖."""
        return Decision.limit_norm(stats.norm, self.limit)


MODE = NormClip
