"""Description of mode ``none``."""

from dataclasses import dataclass

from runner.config.modes.mode import Mode, ModeInfo


@dataclass(eq=False)
class Unclipped(Mode):
    """The gradient is measured, but not clipped."""

    info = ModeInfo(
        clips=None, by_tensor=True, stat="‖G‖", unit="‖G‖", note="These runs clip nothing."
    )


MODE = Unclipped
