"""Description of mode ``per_parameter``, and its option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo


@dataclass(eq=False)
class PerParameter(Mode):
    """Each tensor's gradient is scaled down to a norm of at most the threshold."""

    info = ModeInfo(
        clips="tensors",
        by_tensor=True,
        stat="‖g_p‖ of a tensor",
        unit="‖g_p‖",
        note="A threshold of this mode limits the norm of each tensor, not ‖G‖, so none is drawn.",
        grid=(0.03, 0.1, 0.3, 1.0),
        sources=("optax.clip_by_block_rms (tensor by tensor, of the root mean square)",),
    )

    by: Annotated[
        Literal["tensor", "block"],
        Field(
            description="limit the norm of each tensor, or of each block: parameters whose names "
            "share a prefix such as blocks.3"
        ),
    ] = "tensor"

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why blocks wait: their norm is known when all of their gradients are final."""
        if options["by"] == "block":
            return "with clip.by=block needs all gradients of a block; use clip.by=tensor"
        return super().waits_for(options)


MODE = PerParameter
