"""Hashes that tell whether two jobs, or two sweeps, are the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOT_HASHED = ("tracker", "log", "checkpoint", "sweep", "calibrate", "verify")
"""Sections that do not change what is trained. Two runs that differ only in these sections are the
same experiment."""

_LONGEST_NAME = 48


def config_hash(config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a resolved configuration.

    SHA-256 of canonical JSON (sorted keys, no spaces) without the sections in ``NOT_HASHED``, so
    the order of keys does not matter.
    """
    return _digest({key: value for key, value in config.items() if key not in NOT_HASHED})


def request_hash(hashes: Iterable[str], search: Sequence[str] = ()) -> str:
    """Return 16 hexadecimal digits that identify a sweep: the set of its jobs, in any order.

    Args:
        hashes: hashes of the jobs, from :func:`config_hash`.
        search: overrides of the search space, for a sweeper that chooses jobs by results.
    """
    return _digest([sorted(hashes), sorted(search)])


def sweep_name(recipe: str, keys: Iterable[str], identity: str) -> str:
    """Return the default name of a sweep: its recipe, the keys that vary, and its hash.

    Args:
        recipe: recipe of all jobs, or ``none``.
        keys: keys with several values in the overrides.
        identity: hash of the sweep, from :func:`request_hash`.
    """
    parts = [recipe] if recipe != "none" else []
    parts += keys
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:_LONGEST_NAME].strip("-._")
    return f"{readable or 'sweep'}-{identity[:8]}"


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
