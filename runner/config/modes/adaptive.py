"""Description of mode ``adaptive``, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import OutputDims, Positive, Texts


@dataclass(eq=False)
class Adaptive(Mode):
    """Each unit's gradient is limited to threshold times the norm of the unit's weight."""

    info = ModeInfo(
        clips="units",
        by_tensor=True,
        stat="‖G_u‖/‖W_u‖ of a unit",
        unit="‖W_u‖",
        note="A threshold of this mode is a ratio to the norm of each unit's weights, not a value "
        "of ‖G‖, so none is drawn.",
        published=(
            (0.01, "NFNet at batch 4096 (Brock 2021)"),
            (0.02, "NF-ResNet ablation (Brock 2021)"),
            (0.04, "NF-ResNet ablation (Brock 2021)"),
            (0.08, "NF-ResNet ablation (Brock 2021)"),
            (0.16, "NF-ResNet ablation (Brock 2021); batch 128 to 256 (Thakur)"),
        ),
        shares=(0.2, 0.5, 0.05),
        sources=("Brock, De, Smith and Simonyan 2021, arXiv 2102.06171, section 4",),
    )

    exclude: Annotated[
        Literal["auto"] | Texts,
        Field(
            description="do not clip these parameters, patterns of names, such as [head.*]; "
            "auto: the weights of the model's heads"
        ),
    ] = "auto"
    units: Annotated[
        OutputDims | None,
        Field(
            description="say which dimensions of a parameter index its outputs, by patterns of "
            "names, where a warning asks for it"
        ),
    ] = None
    eps: Annotated[
        Positive,
        Field(
            description="count a weight's norm as at least this, so that weights of zero can move"
        ),
    ] = 1e-3


MODE = Adaptive
