"""Read files that somebody else may have made: regular files of a bounded size and depth.

A file in the folder of a run may be anything: a pipe that never ends, a link to a device, text that
is nested so deeply that a parser crashes, aliases that multiply to billions of values. Every reader
of such a folder opens files here; what does not fit raises :class:`DamagedFile`.
"""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20  # of a JSON file
MOST_YAML = 2**20  # bytes of a YAML file, whose parsers are a hundred times slower
MOST_LINE = 16 * 2**20  # bytes of a line of rows
MOST_DEPTH = 100  # levels of containers
MOST_VALUES = 200_000  # of a YAML file, aliases counted by what they stand for

_BRACKETS = re.compile(rb"[\[{]")
_INDENTED = re.compile(rb"(?m)^[ \t?-]{60}")


class DamagedFile(Exception):
    """A file is none that a run has written; the message names the file and says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}")


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. An OSError says that there is none that can be read."""
    # Without O_NONBLOCK a pipe would wait for a writer.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise DamagedFile(path, "it is no regular file")
    return open(number, "rb")


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most this many bytes."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedFile(path, f"it is larger than {most / 2**20:g} MiB")
    return content


def require_shallow(path: Path, value: Any) -> None:
    """Raise if plain containers are nested deeper than any that a run has written."""
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise too_deep(path)
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children += item.values()
            elif isinstance(item, list):
                children += item
        level = [child for child in children if isinstance(child, dict | list)]


def too_deep(path: Path) -> DamagedFile:
    """Return the error of a file whose containers are nested too deep to be read."""
    return DamagedFile(path, f"it is nested deeper than {MOST_DEPTH} levels")


def yaml_of(path: Path) -> bytes:
    """Return the text of a YAML file that any parser can read without harm."""
    text = content_of(path, MOST_YAML)
    # A file that a run has written has few brackets, little indentation and no anchors.
    flat = len(_BRACKETS.findall(text)) < MOST_DEPTH and not _INDENTED.search(text)
    if not flat or b"&" in text:
        _check_events(path, text)
    return text


def _check_events(path: Path, text: bytes) -> None:
    """Raise if a YAML text is nested too deeply, or if its aliases multiply to too many values."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    counter = _ValueCounter(path)
    try:
        for event in yaml.parse(text, Loader=loader):
            counter.count(event)
    except yaml.YAMLError:
        return  # the parser that reads it says what is wrong


class _ValueCounter:
    """Counts the values that a YAML text stands for, each alias as what its anchor holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = 0
        self._sizes: dict[str, int] = {}  # by anchor; an open container has no size yet
        self._open: list[tuple[str | None, int]] = []  # anchor of a container, values before it

    def count(self, event: Any) -> None:
        """Count an event; raise if there are too many values, or too many open containers."""
        import yaml

        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, self._values))
            self._values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values_before = self._open.pop()
            self._note(anchor, self._values - values_before)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._sizes:
                message = f"*{event.anchor} stands for nothing before it"
                raise DamagedFile(self._path, message)
            self._values += self._sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            self._values += 1
            self._note(event.anchor, 1)
        if len(self._open) > MOST_DEPTH:
            raise too_deep(self._path)
        if self._values > MOST_VALUES:
            message = f"it stands for more than {MOST_VALUES:,} values"
            raise DamagedFile(self._path, message)

    def _note(self, anchor: str | None, size: int) -> None:
        if anchor is not None:
            self._sizes[anchor] = size
