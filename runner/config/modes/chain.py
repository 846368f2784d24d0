"""Description of mode ``chain``, and its option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Allowed

Links = Annotated[
    list[Any],
    Field(
        min_length=1,
        description="clip by these modes, one after the other; each has a mode, a threshold, and "
        "options of this mode",
    ),
    Allowed("a list of modes, such as [{mode:value,threshold:0.5},{mode:norm,threshold:1.0}]"),
    WithJsonSchema(
        {"type": "array", "minItems": 1, "items": {"type": ["object", "number", "string"]}}
    ),
]


@dataclass(eq=False)
class Chain(Mode):
    """Several modes in order: each clips what the one before has left."""

    info = ModeInfo(
        stat="value that each link compares with its threshold",
        note="The thresholds of a chain are those of its links, and none is drawn.",
        nested="links",
    )

    links: Links = field(default_factory=list)

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Yield what is wrong with each link."""
        from runner.config.nested import problems

        for number, link in enumerate(options["links"]):
            yield from problems(f"links.{number}", link)


MODE = Chain
