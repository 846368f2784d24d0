"""What tells one run from another: the hash of a configuration, and where two of them differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from runner.config.notation import Duration
from runner.config.problem import MISSING, leaves

NOT_HASHED = (
    "tracker",
    "log",
    "sweep",
    "report",
    "calibrate",
    "verify",
    "checkpoint",
    "resume",
    "shutdown",
    "trust",
    "activation_checkpointing",
)
"""What does not change what is trained: runs that differ in these sections alone are the same."""

MAY_CHANGE = (
    *NOT_HASHED,
    "telemetry",
    "launch",
    "plugin",
    "device",
    "recipe",
    "compile",
    "early_stopping",
    "callbacks",
    "data.num_workers",
    "clip.what_if",
    "clip.max_skips",
    "clip.when",
    "clip.step_in_backward",
)
"""Sections and keys that may differ between a checkpoint and the run that continues from it."""

PHASES = "accumulation.steps."

NO_PATH = ("auto", "never")
"""Values of ``resume`` that name no run."""

IMPLIED: dict[str, Any] = {
    "clip.skip.of": "norm",
    "data.collate._target_": None,
    "data.leave_out.samples": [],
    "data.leave_out.steps": [],
    "loss.items": "auto",
    "model.leave_out": [],
    "model.strict": True,
    "model.weights": None,
    "optimizer.groups": None,
    "optimizer.no_decay": None,
    "scheduler.by": "steps",
}
"""Values by which earlier versions acted, of keys that their records lack."""


def branching(source: str) -> tuple[str, int] | None:
    """Return the run and the step of ``resume=RUN@STEP``, which begins a branch; else None."""
    match = re.fullmatch(r"(.+)@(\d+)", source)
    return (match[1], int(match[2])) if match else None


def config_hash(config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a configuration as it is recorded."""
    kept = {key: value for key, value in config.items() if key not in NOT_HASHED}
    source = str((config.get("resume") or {}).get("from"))
    return digest(kept | {"resume": source} if branching(source) else kept)


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which a run must not differ from the one that it continues."""
    values_before = _values(saved)
    values_now = _values(wanted)
    pairs = {}
    for key in {**values_now, **values_before}:
        before = values_before.get(key, IMPLIED.get(key, MISSING))
        value = values_now.get(key, MISSING)
        if before != value and not _may_differ(key, before, value):
            pairs[key] = (before, value)
    return pairs


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration by dotted key; phases of ``accumulation.steps`` are one value."""
    values = dict(leaves("", config))
    steps = (config.get("accumulation") or {}).get("steps")
    if isinstance(steps, Mapping):
        values = {key: value for key, value in values.items() if not key.startswith(PHASES)}
        values[PHASES.rstrip(".")] = dict(steps)
    return values


def _may_differ(key: str, before: Any, value: Any) -> bool:
    """Return whether a run may continue one that has another value of this key."""
    if key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE:
        return True
    return key == "train.max_duration" and _is_longer(before, value)


def _is_longer(before: Any, value: Any) -> bool:
    """Return whether a duration is at least as long as before, in the same unit."""
    try:
        earlier = Duration.parse(before)
        duration = Duration.parse(value)
    except ValueError:
        return False
    return earlier.unit == duration.unit and earlier.value <= duration.value


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a value in plain containers."""
    plain = json.loads(json.dumps(value))  # names of several types have no order
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
