"""Mode ``none``: nothing is changed, everything is still measured."""

from dataclasses import dataclass

from runner.clip import ClipMode, Decision, GradStats, Layout
from runner.config.simple_modes import Unclipped


@dataclass(eq=False)
class NoClip(Unclipped, ClipMode):
    """Leave the gradients alone."""

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Report ‖G‖ with a coefficient of 1."""
        return Decision.untouched(stats.norm, None, stats.norm)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        return decision


MODE = NoClip
