"""What tells one run from another: the hash of a configuration, and where two of them differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from runner.config.notation import Duration
from runner.config.problem import MISSING, leaves

NOT_HASHED = (
    *("tracker", "log", "sweep", "report", "calibrate", "verify"),
    *("checkpoint", "resume", "shutdown", "trust"),
)
"""Sections that do not change what is trained: runs that differ in these alone are the same."""

MAY_CHANGE = (
    *NOT_HASHED,
    *("telemetry", "launch", "plugin", "device", "recipe", "early_stopping", "callbacks"),
    *("data.num_workers", "clip.what_if", "clip.max_skips", "clip.when", "clip.step_in_backward"),
)
"""Sections and keys that may differ between a checkpoint and the run that continues from it."""


def branching(source: str) -> tuple[str, int] | None:
    """Return the run and the step of ``resume=RUN@STEP``, which begins a branch; else None."""
    found = re.fullmatch(r"(.+)@(\d+)", source)
    return (found[1], int(found[2])) if found else None


def config_hash(config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a configuration as it is recorded."""
    kept = {key: value for key, value in config.items() if key not in NOT_HASHED}
    source = str((config.get("resume") or {}).get("from"))
    return digest(kept | {"resume": source} if branching(source) else kept)


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which a run must not differ from the one that it continues."""
    before, now = (dict(leaves("", one)) for one in (saved, wanted))
    pairs = {key: (before.get(key, MISSING), now.get(key, MISSING)) for key in {**now, **before}}
    return {
        key: pair
        for key, pair in pairs.items()
        if pair[0] != pair[1]
        and not {key, key.partition(".")[0]} & {*MAY_CHANGE}
        and not (key == "train.max_duration" and _longer(*pair))
    }


def _longer(saved: Any, wanted: Any) -> bool:
    with suppress(ValueError):
        before, now = Duration.parse(saved), Duration.parse(wanted)
        return before.unit == now.unit and before.value <= now.value
    return False


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a value in plain containers."""
    plain = json.loads(json.dumps(value))  # names of several types have no order
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
