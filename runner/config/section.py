"""What the sections of a configuration have in common, the types of their values, and errors.

A value is read strictly: text is never a number, nor true 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, to_jsonable_python

from runner.config.notation import Duration
from runner.config.problem import (
    MISSING,
    NOTHING,
    Problem,
    did_you_mean,
    leaves,
    near_name,
    unknown_key,
)

Conflicts: TypeAlias = Iterable[tuple[Any, ...]]
"""Values that are wrong beside others: the key relative to its section, and the reason.

A third item is the wrong value, if the key has another one, a fourth the value that was probably
meant.
"""


def key(meaning: str, default: Any = ..., **limits: Any) -> Any:
    """Declare a key of a section: its meaning, its default if it has one, and pydantic's limits."""
    return Field(default, description=meaning, **limits)


def listed(value: object) -> object:
    """Return a list of one for a number or a text, which may be typed without brackets."""
    return [value] if type(value) in (int, float, str) else value


def _step_range(value: Any) -> str:
    """Check a range of steps such as ``10:13``, both ends included."""
    match = re.fullmatch(r"(\d+):(\d+)", value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("must be a range of steps, such as 10:13")
    return match[0]


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
_NOT_EMPTY = r"\S"
_FOLDER_NAME = r"^[A-Za-z0-9][\w.\-]{0,99}$"
_DOTTED_NAME = r"^[^\W\d]\w*(\.[^\W\d]\w*)+$"
Text = Annotated[str, Field(pattern=_NOT_EMPTY)]
Texts = list[Text]
FolderName = Annotated[str, Field(pattern=_FOLDER_NAME)]
DottedName = Annotated[str, Field(pattern=_DOTTED_NAME)]
StepRange = Annotated[str, PlainValidator(_step_range)]
DurationText = Annotated[Duration, PlainValidator(Duration.parse)]
IntervalText = Annotated[Duration, PlainValidator(Duration.parse_interval)]


_UNKNOWN_KEY = ("extra_forbidden", "invalid_key", "unexpected_keyword_argument")
"""The types of pydantic's errors for a key that does not exist."""

_SENTENCES = {
    "bool_type": "must be a boolean",
    "dict_type": "must be a dictionary",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer, without a fraction",
    "int_type": "must be an integer",
    "is_instance_of": "must be an instance of {class}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "model_type": "must be a mapping of keys",
    "multiple_of": "must be a multiple of {multiple_of}",
    "none_required": "must be null",
    "set_type": "must be a set",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "must have a length of at most {max_length}",
    "string_too_short": "must have a length of at least {min_length}",
    "string_type": "must be a string",
    "too_long": "must have a length of at most {max_length}, not {actual_length}",
    "too_short": "must have a length of at least {min_length}, not {actual_length}",
    "tuple_type": "must be a tuple",
    "value_error": "{error}",
}
"""What is wrong with a value, by the type of pydantic's error; its context fills the braces."""

_PATTERNS = {
    _NOT_EMPTY: "must not be empty",
    _FOLDER_NAME: "must begin with a letter or a digit, and have at most 100 of A-Z a-z 0-9 _ . -",
    _DOTTED_NAME: "must be a full name, such as torch.optim.SGD",
}
"""What is wrong with a text, by the pattern that it does not match."""


class Section(BaseModel):
    """A section of the configuration: it knows its keys, and checks types and limits."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )

    def conflicts(self) -> Conflicts:
        """Yield the values that exclude each other. Every value has the right type by then."""
        yield from ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        conflicts = list(self.conflicts())
        if conflicts:
            raise refusal(conflicts)
        return self


class Target(Section):
    """An object of any library: its ``_target_``, and arguments under any further key."""

    model_config = ConfigDict(extra="allow")

    target: DottedName = Field(
        alias="_target_",
        description="import another class or function by its full name; further keys of the "
        "section are its arguments",
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the target; the runner may add some when it calls it."""
        return dict(self.model_extra or {})

    def mapping(self) -> dict[str, Any]:
        """Return what `hydra.utils.instantiate` takes."""
        return {"_target_": self.target, **self.arguments}

    def conflicts(self) -> Conflicts:
        """Yield numbers that would make weights NaN."""
        for name in not_finite(self.arguments):
            yield name, "must be a finite number"


def not_finite(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted names of arguments that are NaN, or too large for a float."""
    for name, value in leaves("", arguments):
        if type(value) in (int, float) and not abs(value) < 1e308:
            yield name


def refusal(conflicts: Conflicts) -> ValidationError:
    """Return the error of wrong values, for a validator to raise: it keeps their keys."""
    errors = []
    for name, message, *further in conflicts:
        value = further[0] if further else NOTHING
        suggestion = further[1] if len(further) > 1 else ""
        kind = _conflict(message, suggestion)
        errors.append(InitErrorDetails(type=kind, loc=tuple(name.split(".")), input=value))
    return ValidationError.from_exception_data("conflicts", errors)


def _conflict(message: str, suggestion: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{text}", {"text": message, "suggestion": suggestion})


def problems_of(
    errors: Iterable[ErrorDetails], known: Mapping[str, FieldInfo], plain: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield what pydantic's errors say about each key of ``plain``; ``known`` has the fields."""
    reasons: dict[str, list[str]] = {}  # by key: one for each type that a value may have
    suggestions: dict[str, str] = {}
    for error in errors:
        key = ".".join(str(part) for part in error["loc"])
        if error["type"] in _UNKNOWN_KEY:
            yield from _unknown_keys(key, error["input"], known, plain)
        elif error["type"] == "conflict":
            value = value_at(plain, key) if error["input"] is NOTHING else error["input"]
            yield Problem(key, value, error["msg"], error["ctx"]["suggestion"])
        else:
            name = _field_of(error, known)
            if error["type"] == "literal_error":
                suggestions[name] = near_name(error["input"], _choices(name, known))
            reason = _sentence(error, name, known)
            if reason not in reasons.setdefault(name, []):
                reasons[name].append(reason)
    for name, sentences in reasons.items():
        alternatives = [sentence.removeprefix("must be ") for sentence in sentences[1:]]
        message = ", or ".join([sentences[0], *alternatives])
        yield Problem(name, value_at(plain, name), message, suggestions.get(name, ""))


def _unknown_keys(
    key: str, value: Any, known: Mapping[str, FieldInfo], plain: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield each key at and below one that does not exist."""
    sections = {name.partition(".")[0] for name in known}
    typed = [name for name, _ in leaves("", plain) if name.partition(".")[0] in sections]
    arguments = [name for name in typed if f"{name.partition('.')[0]}._target_" in known]
    for leaf, content in leaves(key, value):
        more = arguments if "." in leaf else typed
        yield unknown_key(leaf, {*known, *more}, content)


def _field_of(error: ErrorDetails, known: Mapping[str, FieldInfo]) -> str:
    """Return the key whose value is wrong.

    An error may name what is inside of a value, or one of the types that it may have.
    """
    parts = [str(part) for part in error["loc"]]
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in known:
            return name
    return ".".join(parts)


def read(model: type[Section], given: Mapping[str, Any]) -> Any:
    """Return the section with these values; a ValueError names what is wrong with them."""
    try:
        return model.model_validate(to_jsonable_python(given))  # tuples are lists there
    except ValidationError as error:
        raise ValueError(sentence(error, model.model_fields, given)) from None


def sentence(
    error: ValidationError, known: Mapping[str, FieldInfo], given: Mapping[str, Any]
) -> str:
    """Return what is wrong with the values of one section, or with the options of one mode."""
    problems = problems_of(error.errors(), known, given)
    return "; ".join(f"{problem.key} {problem.message}" for problem in problems)


def together(errors: Iterable[ErrorDetails]) -> ValidationError:
    """Return one error of several, for a validator to raise."""
    details = []
    for error in errors:
        kind: Any = error["type"]
        if kind == "conflict":
            kind = _conflict(error["msg"], error["ctx"]["suggestion"])
        context = error.get("ctx", {})
        details.append(
            InitErrorDetails(type=kind, loc=error["loc"], input=error["input"], ctx=context)
        )
    return ValidationError.from_exception_data("several", details)


def value_at(plain: Any, name: str) -> Any:
    """Return the value of a dotted key in plain containers; ``MISSING`` if there is none."""
    for part in name.split("."):
        plain = plain.get(part, MISSING) if isinstance(plain, Mapping) else MISSING
    return plain


def no_value(name: str, known: Mapping[str, FieldInfo]) -> str:
    """Return the message of a key that must be given, with its meaning."""
    return "no value given" + (f" ({known[name].description})" if name in known else "")


def _choices(name: str, known: Mapping[str, FieldInfo]) -> list[str]:
    """Return the values that the ``Literal`` in the type of a key allows."""
    return list(_literals(known[name].annotation)) if name in known else []


def _literals(annotation: Any) -> Iterator[str]:
    for part in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(part)
        else:
            yield from _literals(part)


def _sentence(error: ErrorDetails, name: str, known: Mapping[str, FieldInfo]) -> str:
    """Return what an error says about the value of a key, without the key."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return no_value(name, known)
    keys = [key for key in known if key.startswith(f"{name}.")]
    if keys:
        return f"must be a section with the keys {', '.join(keys)}"
    names = _choices(name, known)
    if kind == "literal_error" and names:
        choice = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        return f"must be {choice}{did_you_mean(error['input'], names)}"
    if kind == "string_pattern_mismatch" and context["pattern"] in _PATTERNS:
        return _PATTERNS[context["pattern"]]
    if kind not in _SENTENCES:  # of an option of a user's mode
        return error["msg"]
    return _SENTENCES[kind].format(**{name: _whole(limit) for name, limit in context.items()})


def _whole(limit: Any) -> Any:
    """Return the limit of a value as it is typed: 1 for 1.0."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
