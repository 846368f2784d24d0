"""What the sections of a configuration have in common, and the types of their values.

A value is read strictly: text is never a number, nor true 1. What pydantic's types cannot express
is refused by a ValueError whose text follows the key in a message: "must be ...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from runner.config.duration import Duration, Interval, parse_interval
from runner.config.folders import options
from runner.config.problem import MISSING, NOTHING, did_you_mean

CONFIG = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class OneOf:
    """Allows some names, as ``Literal`` does, that are known only when the program runs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


def option_of(group: str) -> OneOf:
    """Allow the options of ``group``: each file in its folder of ``conf/`` is one."""
    return OneOf(options(group))


def text_like(pattern: str, meaning: str) -> PlainValidator:
    """Allow text of a form; a message says that the value must be ``meaning``."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not re.search(pattern, value):
            raise ValueError(f"must be {meaning}")
        return value

    return PlainValidator(check)


def _norm_order(value: Any) -> float:
    # YAML writes infinity as .inf; a plain ``inf`` in a file is text, on the command line a number.
    order = math.inf if value == "inf" else value
    if isinstance(order, bool) or order not in (1, 2, math.inf):
        raise ValueError("must be 1, 2 or inf")
    return float(order)


def _output_dims(value: Any) -> dict[str, int | list[int]]:
    text = (
        "must be patterns of parameters with the dimension, or the list of dimensions, that "
        "indexes their outputs, such as {*.c_attn.weight:1,experts.*:[0,1]}"
    )
    if not isinstance(value, dict) or not value:
        raise ValueError(text)
    for pattern, dims in value.items():
        listed = dims if isinstance(dims, list) else [dims]
        if wrong := [dim for dim in listed if type(dim) is not int]:
            raise ValueError(f"{text}; {pattern}: {wrong[0]!r} is no dimension")
        if not isinstance(pattern, str) or len(set(listed)) < len(listed):
            raise ValueError(text)
    return value


def _target_mapping(value: Any) -> dict[str, Any]:
    target = value.get("_target_") if isinstance(value, dict) else None
    if not isinstance(target, str) or "." not in target.strip("."):
        raise ValueError("must be a mapping with the _target_ of a class or function")
    return dict(value)


def _metrics(value: Any) -> list[str | dict[str, Any]]:
    listed: Any = value if isinstance(value, list) else [None]
    targets = [one.get("_target_") if isinstance(one, dict) else one for one in listed]
    if not all(isinstance(one, str) and one.strip() for one in targets):
        raise ValueError(
            "must be a list of names of torchmetrics or mappings with a _target_, such as "
            "[accuracy,f1]"
        )
    return list(listed)


def _reads(parse: Callable[[str], Any]) -> PlainValidator:
    def read(value: Any) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"must be {str(error).partition(' must be ')[2]}") from None

    return PlainValidator(read)


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Positives = list[Positive]
Text = Annotated[str, text_like(r"\S", "text")]
Texts = list[Text]
Metrics = Annotated[list[str | dict[str, Any]], PlainValidator(_metrics)]
TargetMapping = Annotated[dict[str, Any], PlainValidator(_target_mapping)]
NormOrder = Annotated[float, PlainValidator(_norm_order)]
OutputDims = Annotated[dict[str, int | list[int]], PlainValidator(_output_dims)]
FolderName = Annotated[
    str,
    text_like(
        r"^[A-Za-z0-9][\w.\-]{0,99}$",
        "the name of a folder: letters, digits, '_', '-' and '.', the first a letter or a digit, "
        "at most 100 of them",
    ),
]
DottedName = Annotated[
    str,
    text_like(
        r"^[^\W\d]\w*(\.[^\W\d]\w*)+$",
        "the full name of a class or function, such as torch.optim.SGD",
    ),
]
DurationText = Annotated[Duration, _reads(Duration.parse)]
IntervalText = Annotated[Interval, _reads(parse_interval)]


class Conflict(NamedTuple):
    """Values that exclude each other: the key to change, relative to the section, and why."""

    key: str
    message: str
    value: Any = NOTHING


class Section(BaseModel):
    """A section of the configuration, immutable."""

    model_config = CONFIG

    def conflicts(self) -> Iterator[Conflict]:
        """Yield the values that exclude each other. Every value has the right type by then."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_missing(cls, given: Any) -> Any:
        """Treat ``???`` like a key that is left out: it would pass for a text."""
        if not isinstance(given, Mapping):
            return given
        own = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in given.items() if key not in own or value != MISSING}


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
        """Return the section that names ``target`` and gives it ``arguments``."""
        return cls.model_validate({"_target_": target, **arguments})

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the target; the runner may add some when it calls it."""
        return dict(self.model_extra or {})

    def mapping(self) -> dict[str, Any]:
        """Return what `hydra.utils.instantiate` takes."""
        return {"_target_": self.target, **self.arguments}


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the model of a field that is a section."""
    hint = field.annotation
    return hint if isinstance(hint, type) and issubclass(hint, Section) else None


_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list, such as [a,b]",
    "dict_type": "a mapping, such as {a:1}",
}
"""What pydantic's errors ask for."""


def sentences(error: ValidationError, section: type[Section] | None = None) -> dict[str, str]:
    """Return what is wrong with each key, to follow it in a message; unknown keys are left out."""
    found: dict[str, list[str]] = {}
    for one in error.errors(include_url=False):
        if one["type"] not in ("extra_forbidden", "invalid_key"):
            key, inner = _key_of(one["loc"], section)
            found.setdefault(key, []).append(_sentence(one, inner))
    # Each alternative of a type has an error of its own.
    return {
        key: ", or ".join(dict.fromkeys(texts)).replace(", or must be ", ", or ")
        for key, texts in found.items()
    }


def _key_of(
    place: tuple[int | str, ...], section: type[Section] | None
) -> tuple[str, type[Section] | None]:
    """Return the dotted key at a place, without what is inside of its value, and its section."""
    keys = [str(place[0])] if place and section is None else []
    for part in place if section else ():
        assert section is not None
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        if part not in fields:
            return ".".join(keys), None
        keys.append(str(part))
        section = section_of(fields[part])
        if section is None:
            break
    return ".".join(keys), section


def _sentence(error: ErrorDetails, section: type[Section] | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        one_of = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        return f"must be {one_of}{did_you_mean(error['input'], names)}"
    if kind == "missing":
        return "no value given"
    if section is not None:
        names = [field.alias or name for name, field in section.model_fields.items()]
        return f"must be a section with the keys {', '.join(names)}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}"
    text = re.sub(r"^\w+ should ", "must ", error["msg"])
    text = text.replace("be greater than or equal to", "be at least")
    return text.replace("be less than or equal to", "be at most")
