"""The way of what a person types: the calls from ``cli/run.py: run`` until the run begins.

``python -m tests.way`` prints it. Each pair of caller and called function counts once, by its first
call, if an argument holds what was typed.

* climb: the call comes from a function two levels or more above the one that was reached last. A
  function that calls one after the other is read downwards: going back to it is no climb.
* return: the call leads into a file that the way has left before.
* new name: the parameter has another name than the variable or the attribute that is given.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import Container, DictConfig

import runner
from runner.cli.main import main
from runner.launch import supervise
from runner.report import page  # noqa: F401  # and what a run imports
from runner.train import preflight, targets  # noqa: F401

HOUSE = Path(runner.__file__).parent
TRIES = 12
"""A pair is looked at so often: a function that reads files is called for values of files first."""
THRESHOLD = 0.21875
WORDS = ["clip=norm", f"clip.threshold={THRESHOLD}", "train.max_duration=1ba"]


class Step(NamedTuple):
    """A call on the way: caller and called function, as ``FILE: NAME``."""

    caller: str
    function: str
    climbs: bool
    returns: bool
    renamed: tuple[str, ...]  # as ``NAME -> PARAMETER``


def holds(value: object, depth: int = 8, seen: set[int] | None = None) -> bool:
    """Whether a value is, or holds, the threshold that was typed, as a number or in a text."""
    seen = set() if seen is None else seen
    if isinstance(value, float):
        return value == THRESHOLD
    if isinstance(value, str):
        return str(THRESHOLD) in value
    if depth == 0 or id(value) in seen or isinstance(value, type | int | bytes | Path):
        return False
    seen.add(id(value))
    items: Iterable[object] = ()
    if isinstance(value, Container):  # of OmegaConf
        is_section = isinstance(value, DictConfig) and not value._is_none()
        items = [item for _, item in value.items_ex(resolve=False)] if is_section else ()
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif type(value).__module__.startswith(("runner", Override.__module__)):
        items = vars_of(value)
    return any(holds(item, depth - 1, seen) for item in items)


def vars_of(value: object) -> list[object]:
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    extra = getattr(value, "__pydantic_extra__", None) or {}
    return [*getattr(value, "__dict__", {}).values(), *slots, *extra.values()]


def house_frame(frame: FrameType | None) -> FrameType | None:
    """The nearest function of the house: comprehensions belong to the function around them."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(str(HOUSE)) and not code.co_name.startswith("<"):
            return frame
        frame = frame.f_back
    return None


def depth_of(frame: FrameType) -> int:
    """The number of functions of the house on the stack."""
    depth = 0
    caller: FrameType | None = frame
    while caller is not None:
        depth += 1
        caller = house_frame(caller.f_back)
    return depth


def place_of(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename).relative_to(HOUSE)
    return f"{file}: {frame.f_code.co_qualname}"


def parameters_of(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def renamed(frame: FrameType, caller: FrameType) -> tuple[str, ...]:
    """The arguments whose parameter has another name than what the caller gives."""
    changes = []
    for parameter in parameters_of(frame):
        value = frame.f_locals.get(parameter)
        if parameter in ("self", "cls") or not holds(value):
            continue
        names = {name for name, local in caller.f_locals.items() if local is value}
        for local in caller.f_locals.values():
            for name, attribute in getattr(local, "__dict__", {}).items():
                if attribute is value:
                    names.add(name.lstrip("_"))
        if names and parameter not in names:
            changes.append(f"{min(names)} -> {parameter}")
    return tuple(changes)


def walk(words: list[str]) -> list[Step]:
    """The steps of a command, in the order of the first call of each."""
    steps: dict[tuple[str, str], Step] = {}
    left: list[str] = []  # files in their order
    tried = Counter[tuple[str, str]]()
    last = ""
    depth_of_last = 0
    begun = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal last, depth_of_last, begun
        if event != "call" or house_frame(frame) is not frame:
            return
        if frame.f_code is supervise.run.__code__:
            begun = True
            sys.settrace(None)
        function = place_of(frame)
        if not last and function != "cli/run.py: run":
            return
        caller = house_frame(frame.f_back)
        pair = ("" if caller is None else place_of(caller), function)
        tried[pair] += 1
        if caller is None or pair in steps or tried[pair] > TRIES:
            return
        names = frame.f_code.co_varnames[
            : frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        ]
        if not any(holds(frame.f_locals.get(name)) for name in names):
            return
        file = function.partition(":")[0]
        here = left[-1] if left else ""
        changes = renamed(frame, caller)
        depth = depth_of(frame)
        steps[pair] = Step(
            *pair,
            climbs=bool(last) and depth_of_last - depth >= 1,
            returns=file != here and file in left,
            renamed=changes,
        )
        left.append(file)
        last = function
        depth_of_last = depth

    sys.settrace(note)
    try:
        assert main([*words, "device=cpu", "tracker=none"]) == 0
    finally:
        sys.settrace(None)
    assert begun
    return list(steps.values())


if __name__ == "__main__":
    steps = walk(WORDS)
    for step in steps:
        marks = ("climb" if step.climbs else "", "return" if step.returns else "", *step.renamed)
        print(f"{step.caller:55} {step.function:55} {'  '.join(filter(None, marks))}")
    print(len(steps), "steps,", len({step.function.partition(":")[0] for step in steps}), "files")
    print(sum(step.climbs for step in steps), "climbs,", end=" ")
    print(sum(step.returns for step in steps), "returns,", end=" ")
    print(sum(len(step.renamed) for step in steps), "new names")
