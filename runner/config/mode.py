"""The contract of a clipping mode, without torch: its options, and facts for readers of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from inspect import get_annotations, isabstract
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, to_jsonable_python

from runner.config.section import Conflicts, refusal, sentence


@dataclass(frozen=True)
class ModeInfo:
    """Facts about a clipping mode that messages, tables and charts show.

    Attributes:
        clips: the kind of thing that is clipped; None for a mode that clips nothing.
        stat: name of the value that is compared with λ, and ``unit``, what λ is a multiple of.
        note: a sentence for the chart of norms.
        published: thresholds of papers, each with who used it; ``grid``: further ones to compare.
        shares: a usual share of parts that is clipped, and the bounds of a usual one.
        follows: what λ in force follows: the number of the step, or the norms of earlier steps.
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


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare an option: its default, or what makes it, its meaning, and pydantic's limits."""
    metadata = {"description": meaning, **limits}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# YAML writes infinity as .inf; a plain ``inf`` in a file is text, on the command line a number.
_Order = Annotated[
    float,
    Field(ge=1, allow_inf_nan=True),
    BeforeValidator(lambda order: math.inf if order == "inf" else order),
]


@dataclass(eq=False)
class Mode:
    """A clipping mode with its options: a dataclass whose fields pydantic validates.

    Attributes:
        info: facts about the mode.
        at_once: options with which it may clip in its first steps; a verification uses them.
        unclipped: options that let it clip nothing beside a threshold that no gradient reaches.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        arbitrary_types_allowed=True,  # of what a mode keeps beside its options
    )

    info: ClassVar[ModeInfo] = ModeInfo()
    at_once: ClassVar[Mapping[str, Any]] = {}
    unclipped: ClassVar[Mapping[str, Any]] = {}

    # Infinity, which a request does not allow, is a limit that is never reached.
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = option(
        None, "lower it to clip more; `calibrate` suggests one"
    )
    norm_type: _Order = option(2.0, "measure this norm of the gradient: 1, 2 or inf")
    scales: Literal["auto", "all"] = option(
        "auto", "scale all gradients; auto: not Muon's matrices"
    )

    def info_here(self) -> ModeInfo:
        """Return the facts about the mode with these options, on which they may depend."""
        return type(self).info

    def conflicts(self) -> Conflicts:
        """Yield what is wrong with options that are right one by one: the option, and why."""
        yield from ()


COMMON = ("norm_type", "scales")
"""Options that ``conf/clip_keys.yaml`` gives; an inner mode takes them from the one around it."""
AnyMode = TypeVar("AnyMode", bound=Mode)
_CHECKED: dict[Any, tuple[Mapping[str, FieldInfo], TypeAdapter[Any]]] = {}


def options_of(kind: type[Mode]) -> Mapping[str, FieldInfo]:
    """Return the options of a mode, and the options that all modes have."""
    return _checked(kind)[0]


def _checked(kind: Any) -> tuple[Mapping[str, FieldInfo], TypeAdapter[Any]]:
    """Return the options of a mode, and what validates them; made once for each mode."""
    if kind not in _CHECKED:
        hints = get_type_hints(kind, include_extras=True)
        options = {
            declared.name: FieldInfo.from_annotated_attribute(hints[declared.name], declared)
            for declared in fields(kind)
            if declared.init
        }
        _CHECKED[kind] = (options, TypeAdapter(kind))
    return _CHECKED[kind]


def validated(kind: type[AnyMode], options: Mapping[str, Any]) -> AnyMode:
    """Return a mode with these options; a ValidationError has everything that is wrong."""
    mode = kind.__new__(kind)
    # As pydantic's own dataclasses do it: a strict validator takes no mapping for a dataclass.
    _, adapter = _checked(kind)
    adapter.validator.validate_python(ArgsKwargs((), dict(options)), self_instance=mode)
    takes_threshold = kind.info.takes_threshold
    if (mode.threshold is None) == takes_threshold:
        message = "this mode takes none: leave it out, or choose clip=norm"
        if takes_threshold:
            message = "must be a finite number greater than 0 for this mode"
        raise refusal([("threshold", message)])
    conflicts = list(mode.conflicts())
    if conflicts:
        raise refusal(conflicts)
    return mode


def checked(kind: type[AnyMode], options: Mapping[str, Any]) -> AnyMode:
    """Return a mode with options of a program, where tuples are lists; a ValueError names all."""
    plain = to_jsonable_python(options)
    try:
        return validated(kind, plain)
    except ValidationError as error:
        raise ValueError(sentence(error, options_of(kind), plain)) from None


@cache
def load(target: str) -> type[Mode]:
    """Import a user's clipping mode; a ValueError says what is wrong with it."""
    module, _, name = target.rpartition(".")
    if not module:
        raise ValueError("must be the full name of a class")
    try:
        kind: Any = getattr(import_module(module), name)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"importing it raised {type(error).__name__}: {text}") from error
    if not (isinstance(kind, type) and issubclass(kind, Mode) and hasattr(kind, "clip")):
        raise ValueError("is no clipping mode: derive the class from runner.clip.FactorMode")
    if isabstract(kind):
        missing = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
        raise ValueError(f"is abstract: it needs {missing}")
    annotated = {key for key, hint in get_annotations(kind).items() if "ClassVar" not in str(hint)}
    undeclared = sorted(annotated - {declared.name for declared in fields(kind)})
    if undeclared:
        raise ValueError(f"put @dataclass above the class, so that {undeclared[0]} is an option")
    try:
        _checked(kind)
    except Exception as error:  # pydantic and typing raise several kinds for odd types
        raise ValueError(f"the types of its options cannot be checked: {error}") from error
    mode: type[Mode] = kind
    return mode
