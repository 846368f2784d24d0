"""The answer of a command to a program: ``--json`` prints one line of JSON on standard output."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from types import MappingProxyType
from typing import Any, NamedTuple

from runner.config.masking import hidden, hidden_in, masked
from runner.config.problem import NOTHING, Problem, RequestError
from runner.launch.failure import Failure
from runner.run_folder.strict_json import encode

FLAG = "--json"


class Answer(NamedTuple):
    """The exit code of a command, and what it answers to a program.

    Content that takes time, such as files to read, is given as a function: ``--json`` calls it.
    """

    exit_code: int
    content: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = MappingProxyType({})


def text_of(answer: Answer) -> str:
    """Return an answer as one line of JSON, without secrets."""
    content = answer.content() if callable(answer.content) else answer.content
    return encode(hidden_in({"exit_code": answer.exit_code, **content}))


def content_of_refusal(error: RequestError) -> dict[str, Any]:
    """Return the problems of a wrong request, each with key, value, message and suggestion."""
    return {"problems": [_content_of_problem(problem) for problem in error.problems]}


def _content_of_problem(problem: Problem) -> dict[str, Any]:
    key, _, typed = problem.key.partition("=")  # of a group, or of a text that is no override
    value = (typed or None) if problem.value is NOTHING else problem.value
    return {
        "key": key,
        "value": _plain(masked(value, key)),
        "message": hidden(problem.message),
        "suggestion": problem.suggestion or None,
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def content_of_failure(failure: Failure) -> dict[str, Any]:
    """Return why a command failed, in one line, and the rank that failed."""
    return {"error": failure.line, "rank": failure.rank}


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send to standard error what this process, and what it starts, prints on standard output."""
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
        os.dup2(kept, 1)
        os.close(kept)
