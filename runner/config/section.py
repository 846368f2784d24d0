"""What the sections of a configuration have in common, the types of their values, and errors.

A value is read strictly: text is never a number, nor true 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import literal_schema

from runner.config.notation import Duration
from runner.config.problem import MISSING, NOTHING, did_you_mean, leaves


class OneOf:
    """Allows some names, as ``Literal`` does, that are known only when the program runs."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return literal_schema(self.names)


def key(meaning: str, default: Any = ..., **limits: Any) -> Any:
    """Declare a key of a section: its meaning, its default if it has one, and pydantic's limits."""
    return Field(default, description=meaning, **limits)


def that(meaning: str, holds: Callable[[Any], bool]) -> PlainValidator:
    """Allow values of which ``holds`` is true; a message says that they must be ``meaning``."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"must be {meaning}")
        return value

    return PlainValidator(check)


def text_like(pattern: str, meaning: str) -> PlainValidator:
    return that(meaning, lambda value: isinstance(value, str) and bool(re.search(pattern, value)))


def _distinct(value: dict[str, int | list[int]]) -> dict[str, int | list[int]]:
    if any(isinstance(dims, list) and len({*dims}) < len(dims) for dims in value.values()):
        raise ValueError("must name each dimension once")
    return value


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, text_like(r"\S", "text")]
Texts = list[Text]
TargetMapping = Annotated[
    dict[str, Any],
    that(
        "a mapping with a _target_",
        lambda value: isinstance(value, dict) and "." in str(value.get("_target_")).strip("."),
    ),
]
Metrics = list[Text | TargetMapping]
# YAML writes infinity as .inf; a plain ``inf`` in a file is text, on the command line a number.
NormOrder = Annotated[
    float,
    that("1, 2 or inf", lambda value: value in (1, 2, math.inf, "inf") and value is not True),
    AfterValidator(float),
]
OutputDims = Annotated[dict[str, int | list[int]], Field(min_length=1), AfterValidator(_distinct)]
_FOLDER = "the name of a folder: letters, digits, '_', '-', '.', the first a letter or a digit"
FolderName = Annotated[str, text_like(r"^[A-Za-z0-9][\w.\-]{0,99}$", _FOLDER)]
DottedName = Annotated[
    str, text_like(r"^[^\W\d]\w*(\.[^\W\d]\w*)+$", "a full name, such as torch.optim.SGD")
]
DurationText = Annotated[Duration, PlainValidator(Duration.parse)]
IntervalText = Annotated[Duration, PlainValidator(Duration.parse_interval)]


class Conflict(NamedTuple):
    """A value that is wrong beside others: its key relative to the section, and why."""

    key: str
    message: str
    value: Any = NOTHING  # where it is not the one at the key


def refusal(conflicts: Iterable[Conflict]) -> ValidationError:
    """Return the error of values that are wrong, for a validator to raise: it keeps their keys."""
    errors = [
        InitErrorDetails(
            type=PydanticCustomError("conflict", "{text}", {"text": one.message}),
            loc=tuple(one.key.split(".")),
            input=one.value,
        )
        for one in conflicts
    ]
    return ValidationError.from_exception_data("conflicts", errors)


class Keys(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_missing(cls, given: Any) -> Any:
        """Treat ``???`` like a key that is left out: it would pass for a text."""
        if not isinstance(given, Mapping):
            return given
        own = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in given.items() if key not in own or value != MISSING}


class Section(Keys):
    def conflicts(self) -> Iterator[Conflict]:
        """Yield the values that exclude each other. Every value has the right type by then."""
        yield from ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        if found := list(self.conflicts()):
            raise refusal(found)
        return self


class Target(Section):
    """An object of any library: its ``_target_``, and arguments under any further key."""

    model_config = ConfigDict(extra="allow")

    target: DottedName = Field(
        alias="_target_",
        description="import another class or function by its full name; further keys of the "
        "section are its arguments",
    )

    @classmethod
    def of(cls, target: str, arguments: Mapping[str, Any]) -> Self:
        return cls.model_validate({"_target_": target, **arguments})

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the target; the runner may add some when it calls it."""
        return dict(self.model_extra or {})

    def mapping(self) -> dict[str, Any]:
        """Return what `hydra.utils.instantiate` takes."""
        return {"_target_": self.target, **self.arguments}

    def conflicts(self) -> Iterator[Conflict]:
        """Yield arguments without a value, and numbers that would make weights NaN."""
        for name, value in leaves("", self.arguments):
            if value == MISSING:
                yield Conflict(name, "no value given", MISSING)
            elif type(value) in (int, float) and not abs(value) < 1e308:
                yield Conflict(name, "must be a finite number")


def read(model: type[Section], given: Mapping[str, Any]) -> Any:
    """Return the section with these values; a ValueError names what is wrong with them."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        found = conflicts_of(error.errors(), {*model.model_fields})
        raise ValueError("; ".join(f"{one.key} {one.message}" for one in found)) from None


def conflicts_of(errors: Iterable[ErrorDetails], known: Collection[str]) -> Iterator[Conflict]:
    """Yield what pydantic's errors say of each of the keys ``known``; unknown keys are left out."""
    found: dict[str, dict[str, Any]] = {}
    for one in errors:
        parts = [*map(str, one["loc"])]
        if one["type"] == "conflict":
            yield Conflict(".".join(parts), one["msg"], one["input"])
        elif one["type"] not in ("extra_forbidden", "invalid_key"):
            # What is inside of a value, or one of the types that it may have, is no key.
            above = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            name = next((key for key in above if key in known), above[0] if above else "")
            found.setdefault(name, {})[_sentence(one, name, known)] = None
    for name, texts in found.items():
        yield Conflict(name, ", or ".join(texts).replace(", or must be ", ", or "))


def _sentence(error: ErrorDetails, name: str, known: Collection[str]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "no value given"
    if inside := [key for key in known if key.startswith(f"{name}.")]:
        return f"must be a section with the keys {', '.join(inside)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        one_of = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        return f"must be {one_of}{did_you_mean(error['input'], names)}"
    text = re.sub(r"^\w+ should ", "must ", error["msg"]).replace("a valid i", "an i")
    text = text.replace("a valid ", "a ").replace("be greater than or equal to", "be at least")
    return text.replace("be less than or equal to", "be at most")
