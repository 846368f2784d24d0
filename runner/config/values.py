"""Types of configuration values, and what messages say that each of them allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from runner.config.duration import (
    FORM,
    INTERVAL_FORM,
    INTERVAL_PATTERN,
    PATTERN,
    Duration,
    Interval,
    parse_interval,
)
from runner.config.folders import options

CONFIG = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
"""Strict: text is never read as a number, nor true as 1. Deferred: the validator of a section is
built once, as a part of the whole configuration's."""


class Refusal(ValueError):
    """A value is refused for a reason that its type does not tell; the message tells it."""


@dataclass(frozen=True)
class Allowed:
    """What a type allows."""

    text: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class OneOf:
    """Allows some names, as ``Literal`` does, that are known only when the program runs."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Read one of the names."""
        return core_schema.literal_schema(list(self.names))


def allowed(hint: Any, metadata: Any = ()) -> Allowed:
    """Return what the annotation ``hint`` allows, with the constraints in ``metadata``."""
    for one in metadata:
        if isinstance(one, Allowed):
            return one
        if isinstance(one, OneOf):
            return _one_of(one.names)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return allowed(args[0], _flat(args[1:]))
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, UnionType):
        parts = [allowed(arg) for arg in args]
        names = tuple(name for part in parts for name in part.names)
        return Allowed(", or ".join(part.text for part in parts), names)
    kind = _KINDS.get(hint) if isinstance(hint, type) else None
    limits = " and ".join(
        f"{words} {getattr(one, name):.16g}"
        for one in metadata
        for name, words in _BOUNDS.items()
        if hasattr(one, name)
    )
    return Allowed(f"{kind or getattr(hint, '__name__', hint)} {limits}".rstrip())


_KINDS = {
    type(None): "null",
    bool: "true or false",
    str: "text",
    int: "an integer",
    float: "a finite number",
}
_BOUNDS = {"ge": "of at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def _flat(metadata: tuple[Any, ...]) -> list[Any]:
    """Return ``metadata`` with the constraints of each ``Field(...)`` in place of it."""
    return [
        part for one in metadata for part in (one.metadata if isinstance(one, FieldInfo) else [one])
    ]


def _one_of(names: tuple[str, ...]) -> Allowed:
    return Allowed(f"one of {', '.join(names)}", names)


def _norm_order(value: Any) -> float:
    # YAML writes infinity as .inf; a plain ``inf`` in a file is text, on the command line a number.
    order = math.inf if value == "inf" else value
    if isinstance(order, bool) or order not in (1, 2, math.inf):
        raise ValueError
    return float(order)


def _output_dims(value: Any) -> dict[str, int | list[int]]:
    if not isinstance(value, dict) or not value:
        raise ValueError
    for pattern, dims in value.items():
        listed = dims if isinstance(dims, list) else [dims]
        if not isinstance(pattern, str) or len(set(map(str, listed))) < len(listed):
            raise ValueError
        if wrong := [dim for dim in listed if type(dim) is not int]:
            raise Refusal(
                f"{pattern}: {wrong[0]!r} is no dimension; give the number of the dimension "
                "that indexes outputs, or a list such as [0,1]"
            )
    return value


def _metrics(value: Any) -> list[str | dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError
    for one in value:
        target = one.get("_target_") if isinstance(one, dict) else one
        if not isinstance(target, str) or not target.strip():
            raise ValueError
    return value


def _target_mapping(value: Any) -> dict[str, Any]:
    target = value.get("_target_") if isinstance(value, dict) else None
    if not isinstance(target, str) or "." not in target.strip("."):
        raise ValueError
    return dict(value)


def _folder_name(value: str) -> str:
    if len(value.encode()) > 200:
        raise ValueError
    return value


def option_of(group: str) -> OneOf:
    """Allow the options of ``group``: each file in its folder of ``conf/`` is one."""
    return OneOf(options(group))


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(pattern=r"\S")]
Texts = Annotated[list[Text], Allowed("a list of texts, such as [a,b]")]
Metrics = Annotated[
    list[str | dict[str, Any]],
    PlainValidator(_metrics),
    Allowed("a list of names of torchmetrics or mappings with a _target_, such as [accuracy,f1]"),
    WithJsonSchema({"type": "array", "items": {"type": ["string", "object"]}}),
]
TargetMapping = Annotated[
    dict[str, Any],
    PlainValidator(_target_mapping),
    Allowed("a mapping with the _target_ of a class or function, and its arguments"),
    WithJsonSchema({"type": "object", "required": ["_target_"]}),
]
Positives = Annotated[
    list[Positive], Allowed("a list of finite numbers greater than 0, such as [0.1,1.0]")
]
NormOrder = Annotated[
    float,
    PlainValidator(_norm_order),
    Allowed("1, 2 or inf"),
    WithJsonSchema({"enum": [1, 2, "inf"]}),
]
OutputDims = Annotated[
    dict[str, int | list[int]],
    PlainValidator(_output_dims),
    Allowed(
        "patterns of parameters with the dimension, or the list of dimensions, that indexes their "
        "outputs, such as {*.c_attn.weight:1,experts.*:[0,1]}"
    ),
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": ["integer", "array"], "items": {"type": "integer"}},
        }
    ),
]
FolderName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][\w.\-]*$", max_length=100),
    AfterValidator(_folder_name),
    Allowed(
        "the name of a folder: letters, digits, '_', '-' and '.', the first a letter or a digit, "
        "at most 100 of them and at most 200 bytes"
    ),
]
DottedName = Annotated[
    str,
    Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$"),
    Allowed("the full name of a class or function, such as torch.optim.SGD"),
]
DurationText = Annotated[
    Duration,
    PlainValidator(Duration.parse),
    Allowed(FORM),
    WithJsonSchema({"type": "string", "pattern": f"^{PATTERN.pattern}$"}),
]
IntervalText = Annotated[
    Interval,
    PlainValidator(parse_interval),
    Allowed(INTERVAL_FORM),
    WithJsonSchema({"type": "string", "pattern": f"^{INTERVAL_PATTERN.pattern}$"}),
]
