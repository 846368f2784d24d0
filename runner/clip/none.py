"""Mode ``none``: nothing is changed, everything is still measured."""

from runner.clip.layout import Layout, Number
from runner.clip.mode import ClipMode, Outcome


class NoClip(ClipMode):
    """Leave the gradients alone."""

    def clip(self, layout: Layout, norm: Number) -> Outcome:
        """Report ``norm`` with a coefficient of 1."""
        return Outcome.untouched(norm, None, norm)


MODE = NoClip
