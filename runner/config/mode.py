"""The contract of a clipping mode, without torch: its options, and facts for readers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import import_module
from inspect import get_annotations
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import ConfigDict, Field, create_model

from runner.config.section import Conflicts, Positive, Section, key


@dataclass(frozen=True)
class ModeInfo:
    """Facts about a clipping mode that messages, tables and charts show.

    Attributes:
        clips: the kind of thing that is clipped; None for a mode that clips nothing.
        stat: name of the value that is compared with λ, and ``unit``, what λ is a multiple of.
        note: a sentence for the chart of norms.
        published: thresholds of papers, each with who used it; ``grid``: further ones to compare.
        shares: a usual share of parts that is clipped, and the bounds of a usual one.
        follows: what λ in force follows: the number of the step, or norms of earlier ones.
        tenth: λ that clips about one step in ten, where it is no norm.
        nested: option that holds further modes, if there is one.
        by_tensor: whether a tensor is clipped without the gradients of others.
        needs_optimizer: whether the state of the optimizer is read, or its update limited.
    """

    clips: Literal["steps", "elements", "units", "tensors", "updates", "groups"] | None = "steps"
    stat: str = "value that is compared with it"
    unit: str = ""
    note: str = "A threshold of this mode is no value of ‖G‖, so none is drawn."
    published: tuple[tuple[float, str], ...] = ()
    grid: tuple[float, ...] = ()
    shares: tuple[float, float, float] = (0.1, 0.5, 0.01)
    follows: Literal["steps", "norms"] | None = None
    tenth: float | None = None
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
    def parts(self) -> str | None:
        """What the mode clips, if that is not the whole gradient of a step."""
        return None if self.clips in (None, "steps") else self.clips


@dataclass(eq=False)
class Mode:
    """Description of a clipping mode: a dataclass whose fields are the options of the mode.

    Attributes:
        info: facts about the mode.
        at_once: options with which it may clip in its first steps; a verification uses them.
        unclipped: options that let it clip nothing beside a threshold that no gradient reaches.
    """

    info: ClassVar[ModeInfo] = ModeInfo()
    at_once: ClassVar[Mapping[str, Any]] = {}
    unclipped: ClassVar[Mapping[str, Any]] = {}

    threshold: float | None = None
    norm_type: float = 2.0
    scales: Literal["auto", "all"] = "auto"

    @classmethod
    def info_with(cls, options: Mapping[str, Any]) -> ModeInfo:
        """Return the facts about the mode with ``options``, on which they may depend."""
        return cls.info

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Conflicts:
        """Yield what is wrong with ``options`` that are right one by one: the option, and why."""
        yield from ()


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare an option: its default, or what makes it, its meaning, and pydantic's limits."""
    made = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"option": Field(description=meaning, **limits)})


@cache
def load(target: str) -> type[Mode]:
    """Import a user's clipping mode; a ValueError says what is wrong with it."""
    module, _, name = target.rpartition(".")
    if not module:
        raise ValueError("must be the full name of a class")
    try:
        kind: type[Mode] = getattr(import_module(module), name)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"importing it raised {type(error).__name__}: {text}") from error
    if not (isinstance(kind, type) and issubclass(kind, Mode) and hasattr(kind, "decide")):
        raise ValueError("is no clipping mode: derive the class from runner.clip.ClipMode")
    annotated = {key for key, hint in get_annotations(kind).items() if "ClassVar" not in str(hint)}
    if undeclared := sorted(annotated - {one.name for one in fields(kind)}):
        raise ValueError(f"put @dataclass above the class, so that {undeclared[0]} is an option")
    try:
        model_of(kind)
    except Exception as error:  # pydantic and typing raise several kinds for odd types
        raise ValueError(f"the types of its options cannot be checked: {error}") from error
    return kind


class Options(Section):
    """λ of a mode; the model that `model_of` makes has the mode's own options as further fields."""

    model_config = ConfigDict(validate_default=True)

    described: ClassVar[type[Mode]] = Mode

    threshold: Positive | None = key("lower it to clip more; `calibrate` suggests one", None)

    def conflicts(self) -> Conflicts:
        info = self.described.info
        if (self.threshold is None) == info.takes_threshold:
            needs = "needs a finite number greater than 0" if info.takes_threshold else "takes none"
            yield "threshold", f"this mode {needs}"
        else:
            yield from self.described.conflicts(dict(self))


_MODELS: dict[Any, type[Options]] = {}


def model_of(mode: type[Mode]) -> type[Options]:
    """Return the pydantic model of the options of a mode, which is made once."""
    if mode in _MODELS:
        return _MODELS[mode]
    options: dict[str, Any] = {}
    hints = get_type_hints(mode, include_extras=True)
    for one in fields(mode):
        if one.init and one.name not in ("threshold", "norm_type", "scales"):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            hint: Any = hints[one.name]
            hint = Annotated[hint, one.metadata.get("option", Field())]
            options[one.name] = hint, ... if default is MISSING else default
    made: Any = create_model(mode.__name__, __base__=Options, **options)
    made.model_rebuild()
    made.described = mode
    _MODELS[mode] = made
    return _MODELS[mode]
