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
    level, depth = [value], 0
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
    sizes: dict[str, int] = {}  # values that an anchor stands for; those that are open have none
    above: list[tuple[str | None, int]] = []  # anchor of each open container, values before it
    values = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionStartEvent):
                above.append((event.anchor, values))
                values += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = above.pop()
                if anchor is not None:
                    sizes[anchor] = values - before
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise DamagedFile(path, f"*{event.anchor} stands for nothing before it")
                values += sizes[event.anchor]
            elif isinstance(event, yaml.ScalarEvent):
                values += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            if len(above) > MOST_DEPTH:
                raise too_deep(path)
            if values > MOST_VALUES:
                raise DamagedFile(path, f"it stands for more than {MOST_VALUES:,} values")
    except yaml.YAMLError:
        return  # the parser that reads it says what is wrong
