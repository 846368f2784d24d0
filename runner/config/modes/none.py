"""What mode ``none`` says about itself."""

from dataclasses import dataclass

from runner.config.modes.mode import Mode, ModeInfo


@dataclass(eq=False)
class Unclipped(Mode):
    """Nothing is changed; everything is still measured."""

    info = ModeInfo(clips=None, stat="‖G‖", unit="‖G‖", note="These runs clip nothing.")


MODE = Unclipped
