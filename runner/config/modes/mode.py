"""Description of a clipping mode, without torch: its options, and facts for readers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        follows: what changes the λ in force from step to step: the number of ``steps``, or the
            ``norms`` of the gradient or the ``updates`` of the steps before, see :attr:`derived`.
            None where λ stays as it is.
        tenth: threshold that clips about a tenth of the steps, where that is known without a
            measurement.
        sources: where the rule is from.
        nested: option that holds modes with thresholds of their own, for a mode that has none.
        by_tensor: whether the mode decides about a tensor by its gradient, its weight and its
            history alone. Only then can it clip in the backward pass.
        needs_optimizer: whether the mode reads or limits what the optimizer does, so that it is
            bound to the optimizers too, see :meth:`runner.clip.ClipMode.bind_optimizers`.
    """

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
        """Whether λ follows from earlier steps.

        ``clip.threshold`` is then no value that ``stat`` is compared with, so it cannot be
        suggested from measurements.
        """
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
    """Description of a clipping mode: a dataclass whose fields are the options of the mode.

    A further option is a field with a default; ``pydantic.Field`` gives its range and its meaning::

        decay: Annotated[float, Field(gt=0, lt=1, description="weigh earlier steps")] = 0.9

    Args:
        threshold: λ, above 0. It may be changed between steps; each step logs the one in force.
        norm_type: p of the total norm that is measured (and that mode ``norm`` limits).
        scales: which gradients a mode that decides on one coefficient multiplies, and whose norm it
            compares with λ: ``"auto"`` leaves out the matrices of Muon, ``"all"`` nothing.
    """

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
        """Yield what is wrong with ``options`` that are right one by one: the option, and why.

        A third item is the value, where the option is a part of another one, such as ``links.0``.

        Args:
            options: all options of the mode, ``threshold`` included.
        """
        yield from ()

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why the mode cannot clip a tensor before other gradients are final.

        Args:
            options: all options of the mode.

        Returns:
            The reason, to follow the name of the mode; empty if it can.
        """
        if cls.info.by_tensor:
            return ""
        if cls.info.nested:
            return f"clips by the modes in clip.{cls.info.nested}, after the backward pass"
        return "needs the whole gradient, which is known after the backward pass"
