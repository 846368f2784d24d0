"""Which targets of a recorded configuration may be called.

The ``config.yaml`` of a run folder may be a stranger's. A target that comes from it, and not from
the command or from the user's own folder of options, is called only if it is a class of this
project, or a module, data set, optimizer, scheduler, criterion or metric of a library that makes
such things. This module decides by names, without importing anything that is named;
`runner/train/targets.py` decides by types, before the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.folders import Refusal, read_yaml
from runner.config.problem import Problem, leaves

TARGET = "_target_"
PROJECT = tuple(
    f"runner.{room}."
    for room in ("models", "data", "optim", "clip", "train.callbacks", "telemetry.sinks")
)
LIBRARIES = (
    *("torch.nn.", "torch.optim.", "torch.utils.data."),
    *("torchvision.models.", "torchvision.datasets.", "torchvision.transforms."),
    *("torchvision.ops.", "timm.", "transformers.", "torchmetrics."),
)


class Recorded(NamedTuple):
    """A target of a recorded configuration."""

    key: str  # dotted, such as ``model.config._target_``
    target: str
    arguments: Mapping[str, Any]

    @property
    def problem(self) -> Problem:
        """What is wrong with a target that may not be called."""
        libraries = "torch, torchvision, timm, transformers or torchmetrics"
        message = (
            f"comes from the run's config.yaml, and is no class of this project, nor a module, "
            f"data set, optimizer, scheduler, criterion or metric of {libraries}. A run folder is "
            f"code: if you trust it, add trust=true, or type {self.key}={self.target}"
        )
        return Problem(self.key, self.target, message)


@dataclass
class Origin:
    """What a user typed over a recorded configuration: all other targets are the record's."""

    keys: set[str] = field(default_factory=set)  # of typed targets
    sections: list[str] = field(default_factory=list)  # typed as a whole
    names: set[str] = field(default_factory=set)  # targets in the user's own folder of options

    def add(self, key: str, value: Any, *, whole: bool) -> None:
        """Note an override; ``whole``: it replaces everything below its key."""
        if whole:
            self.sections.append(key)
            return
        for leaf, content in leaves(key, value):
            if leaf.rpartition(".")[2] == TARGET:
                self.keys.add(leaf)
            elif isinstance(content, list):
                self.sections.append(leaf)

    def add_folder(self, folder: Path) -> None:
        """Note the targets that the user's own options name."""
        for file in folder.rglob("*.yaml"):
            with suppress(Refusal):
                self.names |= {recorded.target for recorded in targets_in(read_yaml(file))}

    def recorded(self, plain: Mapping[str, Any]) -> list[Recorded]:
        """Return the targets of a resolved configuration that were not typed."""
        return [recorded for recorded in targets_in(plain) if not self._is_typed(recorded)]

    def _is_typed(self, recorded: Recorded) -> bool:
        below = any(recorded.key.startswith(f"{section}.") for section in self.sections)
        return below or recorded.key in self.keys or recorded.target in self.names


def targets_in(value: Any, key: str = "") -> Iterator[Recorded]:
    """Yield every target of plain containers, however deep."""
    dot = "." if key else ""
    if isinstance(value, Mapping):
        if value.get(TARGET) is not None:
            yield Recorded(f"{key}{dot}{TARGET}", str(value[TARGET]), value)
        for name, item in value.items():
            yield from targets_in(item, f"{key}{dot}{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from targets_in(item, f"{key}{dot}{number}")


def unknown(targets: Sequence[Recorded]) -> list[Problem]:
    """Return what is wrong with targets whose names alone tell that they may not be called."""
    problems = []
    for recorded in targets:
        # The class of a mode is imported to check its options.
        allowed = PROJECT if recorded.key.startswith("clip.") else (*PROJECT, *LIBRARIES)
        parts = recorded.target.split(".")
        hidden = any(part.startswith("_") for part in parts) or not all(parts)
        if hidden or not recorded.target.startswith(allowed):
            problems.append(recorded.problem)
    return problems
