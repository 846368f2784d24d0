"""What makes two jobs, and two sweeps, the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOT_HASHED = ("tracker", "log", "sweep", "calibrate", "verify")
"""Sections of a config that decide where figures go, how often, and what is done about a failure,
never what is trained; two runs that differ in these alone are the same experiment."""

_LONGEST_NAME = 48


def config_hash(config: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that name what a resolved config asks for.

    SHA-256 of canonical JSON (sorted keys, no spaces) without the sections in ``NOT_HASHED``, so
    the order of keys does not matter.
    """
    return _digest({key: value for key, value in config.items() if key not in NOT_HASHED})


def request_hash(hashes: Iterable[str], search: Sequence[str] = ()) -> str:
    """16 hexadecimal digits that name a sweep: the set of its jobs, in whatever order.

    Args:
        hashes: what :func:`config_hash` made of each job.
        search: where a sweeper chooses the jobs as it goes, the words that tell it how.
    """
    return _digest([sorted(hashes), sorted(search)])


def sweep_name(recipe: str, keys: Iterable[str], identity: str) -> str:
    """The name of a sweep that nobody named: what one would look for, then which one it is.

    Args:
        recipe: the recipe of all its jobs, or ``none``.
        keys: what varies by words that were typed.
        identity: what :func:`request_hash` made of it.
    """
    parts = [recipe] if recipe != "none" else []
    parts += keys
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:_LONGEST_NAME].strip("-._")
    return f"{readable or 'sweep'}-{identity[:8]}"


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
