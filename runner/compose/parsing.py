"""Parse overrides by Hydra's grammar, and refuse those that nothing can be done with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Sweep
from hydra.errors import HydraException

from runner.config.problem import NOTHING, Problem, or_list

LONGEST = 20_000
"""Characters of the longest override. Hydra reads some ten thousand a second."""

LONGEST_KEY = 200
"""Bytes of the longest key: Hydra looks for a folder of this name."""

_ODD = re.compile("[\0\ud800-\udfff]")
"""What no file can hold: NUL, and bytes of an argument that are no UTF-8."""


def parse(words: Iterable[str], loader: ConfigLoader) -> tuple[list[Override], list[Problem]]:
    """Parse overrides."""
    parser = _parser(loader)
    overrides, problems = [], []
    for word in words:
        try:
            overrides += _parsed(word, parser)
        except RecursionError:
            problems.append(_unreadable(word, "it is nested too deep", loader))
        except Exception as error:  # beside HydraException the ValueError of a number, and more
            problems.append(_unreadable(word, str(error), loader))
    return overrides, problems


@lru_cache(maxsize=1)
def _parser(loader: ConfigLoader) -> OverridesParser:
    """Return Hydra's parser. Making one takes as long as parsing an override."""
    return OverridesParser.create(config_loader=loader)


def _parsed(word: str, parser: OverridesParser) -> list[Override]:
    if len(word) > LONGEST:
        raise HydraException(f"it has {len(word):,} characters, and at most {LONGEST:,} are read")
    if odd := _ODD.search(word):
        raise HydraException(f"it holds {odd[0]!a}, which is no character of a text")
    if word.startswith("="):
        raise HydraException("there is no key")
    parsed: list[Override] = parser.parse_overrides([word])
    for override in parsed:
        if len(override.key_or_group.encode()) > LONGEST_KEY:
            raise HydraException("its key is longer than the name of any file")
        value = override.value()
        listed = value.list if isinstance(value, ChoiceSweep) else value
        if any(isinstance(part, Sweep | Glob) for part in _parts(listed)):
            raise HydraException("choices, ranges and intervals cannot stand inside a list")
    return parsed


def _parts(value: Any) -> Iterator[Any]:
    """Yield everything inside the lists and dicts of ``value``."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inside:
        yield part
        yield from _parts(part)


def _unreadable(word: str, error: str, loader: ConfigLoader) -> Problem:
    key, equals, value = word.partition("=")
    if not equals:
        homes = [
            f"{group}={word}"
            for group in loader.list_groups("")
            if group != "hydra" and word in loader.get_group_options(group)
        ]
        near = f"; did you mean {or_list(homes)}?" if homes else ""
        return Problem(word, NOTHING, f"must be KEY=VALUE or GROUP=OPTION{near}")
    reason = error.partition("\n")[0]
    return Problem(
        key,
        value,
        f"cannot be read: {reason}; text with spaces or signs goes in quotes within quotes, "
        f"as in '{key}=\"a (b)\"'",
    )
