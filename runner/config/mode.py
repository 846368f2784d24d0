"""The contract of a clipping mode, without torch: its options, and facts for readers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from importlib import import_module
from inspect import get_annotations, isabstract
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field

from runner.config.problem import did_you_mean

Conflicts = Iterator[tuple[Any, ...]]


@dataclass(frozen=True)
class ModeInfo:
    """Facts about a clipping mode that messages, tables and charts show.

    Attributes:
        clips: the kind of thing that is clipped; None for a mode that clips nothing.
        stat: name of the value that is compared with λ, and ``unit``, what λ is a multiple of.
        note: a sentence for the chart of norms.
        published: thresholds of papers, each with who used it; ``grid``: further ones to compare.
        shares: a usual share of parts that is clipped, and the bounds of a usual one.
        follows: what λ in force follows; None if it is the same in each step.
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
    def derived(self) -> bool:
        """Whether λ follows from earlier steps."""
        return self.follows == "norms"

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

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why the mode cannot clip a tensor before other gradients are final."""
        if cls.info.by_tensor:
            return ""
        if cls.info.nested:
            return f"clips by the modes in clip.{cls.info.nested}, after the backward pass"
        return "needs the whole gradient, which is known after the backward pass"


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare an option: its default, or what makes it, its meaning, and pydantic's limits."""
    made = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"option": Field(description=meaning, **limits)})


# Annotations are text that is compiled, and a loop of a user's own makes its mode in each step.
_hints = cache(partial(get_type_hints, include_extras=True))


def options_of(mode: type[Mode]) -> dict[str, tuple[Any, Any]]:
    """Return the options that a mode has besides those of all modes: annotation and default."""
    found = {}
    for one in fields(mode):
        if one.init and one.name not in ("threshold", "norm_type", "scales"):
            hint = _hints(mode)[one.name]  # type: ignore[arg-type]
            if declared := one.metadata.get("option"):
                hint = Annotated[hint, declared]
            default = one.default if one.default_factory is MISSING else one.default_factory()
            found[one.name] = hint, ... if default is MISSING else default
    return found


class ModeError(ValueError):
    """A ``clip._target_`` that is not a clipping mode; the message says what is wrong with it."""


@cache
def load(target: str) -> type[Mode]:
    """Import a user's clipping mode; a ModeError says what is wrong with it."""
    module, _, name = str(target).rpartition(".")
    if not module:
        raise ModeError("must be the full name of a class, such as package.Mode")
    try:
        holder = import_module(module)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ModeError(f"importing {module} raised {type(error).__name__}: {text}") from error
    kind = getattr(holder, name, None)
    if kind is None:
        modes = [f"{module}.{key}" for key, one in vars(holder).items() if _is_mode(one)]
        raise ModeError(f"{module} has no class {name}{did_you_mean(target, modes)}")
    if not _is_mode(kind):
        raise ModeError("is no clipping mode: derive the class from runner.clip.ClipMode")
    if isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ModeError(f"is abstract: the class has to implement {missing}")
    annotated = {key for key, hint in get_annotations(kind).items() if "ClassVar" not in str(hint)}
    if undeclared := sorted(annotated - {one.name for one in fields(kind)}):
        raise ModeError(f"put @dataclass above the class, so that {undeclared[0]} is an option")
    found: type[Mode] = kind
    return found


def _is_mode(found: object) -> bool:
    """Return whether an object is a class that implements a mode, not one that describes it."""
    return isinstance(found, type) and issubclass(found, Mode) and hasattr(found, "decide")
