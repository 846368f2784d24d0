"""Description of a clipping mode, without torch: its options, and facts for readers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self


@dataclass(frozen=True)
class ModeInfo:
    """Facts about a clipping mode that messages, tables and charts show."""

    clips: Literal["steps", "elements", "units", "tensors", "updates", "groups"] | None = "steps"
    stat: str = "value that is compared with it"
    unit: str = ""
    note: str = ""
    published: tuple[tuple[float, str], ...] = ()
    grid: tuple[float, ...] = ()
    shares: tuple[float, float, float] = (0.1, 0.5, 0.01)
    follows: Literal["steps", "norms", "updates"] | None = None
    tenth: float | None = None
    sources: tuple[str, ...] = ()
    nested: str = ""
    by_tensor: bool = False
    needs_optimizer: bool = False

    @property
    def takes_threshold(self) -> bool:
        """Whether the mode has a λ of its own."""
        return self.clips is not None and not self.nested

    @property
    def limits_norm(self) -> bool:
        """Whether λ is a limit of the total norm, the same in each step."""
        return self.unit == "‖G‖" and self.follows is None

    @property
    def derived(self) -> bool:
        """Whether λ follows from earlier steps."""
        return self.follows in ("norms", "updates")

    @property
    def moves_limit(self) -> bool:
        """Whether ``clip/threshold`` of each row is a limit of the total norm that moves."""
        return self.follows == "norms" or (self.follows == "steps" and self.unit == "‖G‖")

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
    """Description of a clipping mode: a dataclass whose fields are the options of the mode."""

    info: ClassVar[ModeInfo] = ModeInfo()
    at_once: ClassVar[Mapping[str, Any]] = {}
    """Options with which the mode may clip in its first steps; a verification uses them."""

    unclipped: ClassVar[Mapping[str, Any]] = {}
    """Options that let the mode clip nothing beside a threshold that no gradient reaches."""

    threshold: float | None = None
    norm_type: float = 2.0
    scales: Literal["auto", "all"] = "auto"

    @classmethod
    def info_with(cls, options: Mapping[str, Any]) -> ModeInfo:
        """Return the facts about the mode with ``options``, on which they may depend."""
        return cls.info

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Yield what is wrong with ``options`` that are right one by one: the option, and why."""
        yield from ()

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why the mode cannot clip a tensor before other gradients are final."""
        if cls.info.by_tensor:
            return ""
        if cls.info.nested:
            return f"clips by the modes in clip.{cls.info.nested}, after the backward pass"
        return "needs the whole gradient, which is known after the backward pass"
