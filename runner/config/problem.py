"""What is wrong with a request, and the one message that says all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from runner.config.notation import plural

MISSING = "???"  # how a configuration file marks a value that somebody must give


class _Nothing:
    """Stands for no value, where None is a value."""

    def __repr__(self) -> str:
        return "NOTHING"

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


def shown(value: Any) -> str:
    """``value`` as one would type it; text that would be read as something else is in quotes."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value) if _reads_as_other(value) else value
        case list() | tuple():
            return "[" + ",".join(shown(item) for item in value) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _reads_as_other(text: str) -> bool:
    if text.strip() != text or text == "" or text.lower() in {"null", "true", "false"}:
        return True
    if text.lower() in {"nan", "inf", "-inf", "infinity", "-infinity"}:
        return False  # a file has no other way to write them
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request.

    Attributes:
        key: the dotted key, or the word, that is wrong.
        value: what it was given; `NOTHING` where there is no value to show.
        message: what is allowed, and the nearest right name where one is near.
        job: the words of the job it was found in; empty where it concerns the whole request.
    """

    key: str
    value: Any
    message: str
    job: str = ""

    @property
    def word(self) -> str:
        """The key and its value, as one would type them."""
        return self.key if self.value is NOTHING else f"{self.key}={shown(self.value)}"


@dataclass(frozen=True)
class DataMismatch(Problem):
    """The model does not take the samples of the data."""


class RequestError(Exception):
    """A request that cannot be run; its text names every problem.

    Args:
        problems: what is wrong, at least one.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(_block(self.problems))

    def __reduce__(self) -> tuple[type[RequestError], tuple[tuple[Problem, ...]]]:
        # Exception's own would hand the finished text to __init__ in another process.
        return type(self), (self.problems,)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, on the way out of the program after the user was told what it ended."""


def _block(problems: tuple[Problem, ...]) -> str:
    count = plural(len(problems), "problem")
    width = min(max((len(problem.word) for problem in problems), default=0), 40)
    lines = [f"clip-runner: this request cannot be run ({count})"]
    for problem in problems:
        place = f"  (in the job {problem.job})" if problem.job else ""
        lines.append(f"  {problem.word:<{width}}  {problem.message}{place}")
    return "\n".join(lines)
