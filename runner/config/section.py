"""What the sections of a configuration have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from runner.config.problem import MISSING, NOTHING
from runner.config.values import CONFIG, DottedName


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

    target: Annotated[DottedName, Field(alias="_target_")] = Field(
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
