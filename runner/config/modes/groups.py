"""Description of mode ``groups``, and its option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Allowed

Groups = Annotated[
    dict[str, Any],
    Field(
        min_length=1,
        description="clip parameters by patterns of their names: each has a mode with its "
        "threshold and options, a limit of the norm, or none; the first match counts",
    ),
    Allowed(
        "patterns of parameter names, each with a mode, a limit of the norm, or none, such as "
        "{head.*:none,*.attn.*:0.5,*:{mode:norm,threshold:1.0}}"
    ),
    WithJsonSchema(
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": ["object", "number", "string"]},
        }
    ),
]


@dataclass(eq=False)
class ByGroups(Mode):
    """Each group of parameters is measured and clipped by itself, by a mode of its own."""

    info = ModeInfo(
        clips="groups",
        stat="value that each group compares with its threshold",
        note="The thresholds are those of the groups, not of ‖G‖, and none is drawn.",
        nested="groups",
    )

    groups: Groups = field(default_factory=dict)

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Yield what is wrong with each group."""
        from runner.config.nested import problems

        for pattern, mode in options["groups"].items():
            yield from problems(f"groups.{pattern}", mode)


MODE = ByGroups
