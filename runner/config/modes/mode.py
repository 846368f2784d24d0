"""Description of a clipping mode, without torch: its options, and facts for readers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self


@dataclass(frozen=True)
class ModeInfo:
    """Facts about a clipping mode that messages, tables and charts show.

    Attributes:
        clips: what the mode clips; None where it clips nothing.
        stat: name of the value that the mode compares with λ, to follow "the largest".
        unit: unit of λ. ``‖G‖`` where λ is a limit of the total norm, which charts then draw.
        note: sentence below the chart of the norm, which says whether λ is in the chart.
        published: thresholds in publications, each with who used it.
        grid: further thresholds worth comparing, where publications give none.
        shares: for a mode that clips elements, units or tensors: the share of them that a good
            first threshold clips, and those that the lowest and the highest threshold of a sweep
            clip.
        sources: where the rule is from.
    """

    clips: Literal["steps", "elements", "units", "tensors", "updates"] | None = "steps"
    stat: str = "value that is compared with it"
    unit: str = ""
    note: str = ""
    published: tuple[tuple[float, str], ...] = ()
    grid: tuple[float, ...] = ()
    shares: tuple[float, float, float] = (0.1, 0.5, 0.01)
    sources: tuple[str, ...] = ()

    @property
    def limits_norm(self) -> bool:
        """Whether λ is a limit of the total norm."""
        return self.unit == "‖G‖"

    @property
    def parts(self) -> str | None:
        """What the mode clips, if that is not the whole gradient of a step."""
        return None if self.clips in (None, "steps") else self.clips

    @property
    def studied(self) -> tuple[float, ...]:
        """Thresholds that a calibration compares: the published ones and those of ``grid``."""
        return tuple(value for value, _ in self.published) + self.grid

    def record(self) -> dict[str, Any]:
        """Return the facts as plain containers."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the facts that :meth:`record` returned, also after they were read from JSON."""
        listed = {key: tuple(value) for key, value in record.items() if isinstance(value, list)}
        if "published" in listed:
            listed["published"] = tuple((value, who) for value, who in listed["published"])
        return cls(**{**record, **listed})


@dataclass(eq=False)
class Mode:
    """Description of a clipping mode: a dataclass whose fields are the options of the mode.

    A further option is a field with a default; ``pydantic.Field`` gives its range and its meaning::

        decay: Annotated[float, Field(gt=0, lt=1, description="weigh earlier steps")] = 0.9

    Args:
        threshold: λ, above 0. It may be changed between steps; each step logs the one in force.
        norm_type: p of the total norm that is measured (and that mode ``norm`` limits).
    """

    info: ClassVar[ModeInfo] = ModeInfo()

    threshold: float | None = None
    norm_type: float = 2.0
