"""Description of mode ``schedule``, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Allowed, Count, Natural, Positive, TargetMapping

Inner = Annotated[
    str | dict[str, Any],
    Field(description="clip by this mode; with options: {mode:adaptive,eps:1e-3}"),
    Allowed("the name of a mode, or a mapping such as {mode:adaptive,eps:1e-3}"),
    WithJsonSchema({"type": ["string", "object"]}),
]


@dataclass(eq=False)
class Schedule(Mode):
    """Another mode clips, with a λ that depends on the number of the optimizer step."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="‖G‖",
        note="Dashed: the threshold of each step; norms above it are clipped.",
        follows="steps",
        sources=("https://github.com/allenai/OLMo, grad_clip_warmup_factor",),
    )
    at_once: ClassVar = {"warmup_steps": 0}

    of: Inner = "norm"
    warmup_steps: Annotated[
        Natural,
        Field(description="multiply the threshold by warmup_factor in so many first steps"),
    ] = 1000
    warmup_factor: Annotated[
        Positive, Field(description="multiply the threshold by this in the first step")
    ] = 10.0
    warmup: Annotated[
        Literal["constant", "linear"],
        Field(
            description="constant: keep the factor until the warm-up ends, then use the threshold "
            "at once; linear: go there in a line"
        ),
    ] = "constant"
    decay: Annotated[
        Literal["constant", "linear", "cosine"],
        Field(description="change the threshold after the warm-up, in a line or by half a cosine"),
    ] = "constant"
    steps: Annotated[
        Count | None,
        Field(description="let the decay take so many steps, counted from the end of the warm-up"),
    ] = None
    end_factor: Annotated[
        Positive, Field(description="multiply the threshold by this after the decay")
    ] = 0.1
    scheduler: Annotated[
        TargetMapping | None,
        Field(
            description="take the shape of this scheduler of learning rates instead, such as "
            "{_target_:torch.optim.lr_scheduler.ExponentialLR,gamma:0.99}"
        ),
    ] = None

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why a schedule waits: it sets λ step by step."""
        return "sets the threshold of another mode, which then clips after the backward pass"

    @classmethod
    def info_with(cls, options: Mapping[str, Any]) -> ModeInfo:
        """Return the facts about the mode that clips, whose λ moves."""
        from runner.config.nested import arguments_of, described_of, written_out

        node = written_out(options["of"])
        inner = described_of(node).info_with(arguments_of(node))
        note = cls.info.note if inner.limits_norm else inner.note
        return replace(inner, follows=inner.follows or "steps", note=note)

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Yield wrong options of the mode that clips, and shapes that exclude each other."""
        from runner.config.nested import described_of, problems, written_out

        found = [*problems("of", options["of"], {"threshold": options["threshold"]})]
        if not any(key in ("of", "of.mode", "of._target_") for key, *_ in found):
            kind = described_of(written_out(options["of"]))
            if issubclass(kind, Schedule) or not kind.info.takes_threshold:
                found = [
                    ("of", "has no threshold of its own that a schedule could set", options["of"])
                ]
        yield from found
        decays, shaped = options["decay"] != "constant", options["scheduler"] is not None
        if decays and options["steps"] is None and not shaped:
            yield "steps", f"clip.decay={options['decay']} needs the number of its steps"
        if shaped and (decays or options["warmup_steps"]):
            yield "scheduler", "takes the place of clip.warmup_steps (use 0) and clip.decay"


MODE = Schedule
