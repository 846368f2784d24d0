"""Description of mode ``value``."""

from dataclasses import dataclass

from runner.config.modes.mode import Mode, ModeInfo


@dataclass(eq=False)
class Value(Mode):
    """Every element of the gradient is clamped to [-threshold, threshold]."""

    info = ModeInfo(
        clips="elements",
        by_tensor=True,
        stat="gradient element",
        unit="|g|",
        note="A threshold of this mode bounds single elements, not ‖G‖, so none is drawn.",
        grid=(0.1, 0.25, 1.0, 2.0),
        shares=(0.01, 0.1, 0.001),
        sources=("Mikolov 2012, Statistical Language Models Based on Neural Networks",),
    )


MODE = Value
