"""Whether two jobs, or two sweeps, are the same, and what a continued run may change."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.config.check import leaves
from runner.config.duration import Duration
from runner.config.problem import MISSING
from runner.config.skip_section import Skip
from runner.config.telemetry_section import Telemetry

NOT_HASHED = (
    *("tracker", "log", "sweep", "report", "calibrate", "verify"),
    *("checkpoint", "resume", "shutdown"),
)
"""Sections that do not change what is trained. Two runs that differ only in these sections are the
same experiment."""

MAY_CHANGE = (
    *NOT_HASHED,
    *("telemetry", "launch", "plugin", "device", "recipe", "early_stopping", "callbacks"),
    *("data.num_workers", "clip.what_if", "clip.max_skips"),
    *("clip.when", "clip.step_in_backward"),
)
"""Sections and keys that may differ between a checkpoint and the run that continues from it."""

_NEWER = {
    "clip.scales": "auto",
    "clip.when": "step",
    "clip.step_in_backward": False,
    **{f"clip.skip.{name}": field.default for name, field in Skip.model_fields.items()},
    **{
        f"telemetry.{name}": field.default
        for name, field in Telemetry.model_fields.items()
        if not field.is_required()
    },
}
"""Keys that configurations recorded earlier lack, with the values that they had in effect."""

ENVIRONMENT = "environment"
"""Section of a recorded configuration: digests of values that come from the environment."""

_LONGEST_NAME = 48
_LENGTH = "train.max_duration"


def config_hash(config: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify a configuration as it is recorded."""
    return digest(_hashed(config, ""))


def _hashed(config: Mapping[str, Any], above: str) -> dict[str, Any]:
    """Return what of a configuration, or of a section, identifies it."""
    kept = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if name in NOT_HASHED or (name in _NEWER and value == _NEWER[name]):
            continue
        inside = f"{name}."
        if isinstance(value, Mapping) and any(newer.startswith(inside) for newer in _NEWER):
            value = _hashed(value, inside)
            if not value:
                continue
        kept[key] = value
    return kept


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which a run must not differ from the one that it continues."""
    before, now = ({**_NEWER, **dict(leaves("", one))} for one in (saved, wanted))
    found = {}
    for key in dict.fromkeys([*now, *before]):
        pair = before.get(key, MISSING), now.get(key, MISSING)
        named = key.removeprefix(f"{ENVIRONMENT}.")
        counts = named not in MAY_CHANGE and named.partition(".")[0] not in MAY_CHANGE
        if counts and pair[0] != pair[1] and not (key == _LENGTH and _is_longer(*pair)):
            found[key] = pair
    return found


def _is_longer(saved: Any, wanted: Any) -> bool:
    try:
        before, now = Duration.parse(saved), Duration.parse(wanted)
    except ValueError:
        return False
    return before.unit == now.unit and before.value <= now.value


def request_hash(hashes: Iterable[str], search: Sequence[str] = ()) -> str:
    """Return 16 hexadecimal digits that identify a sweep: the set of its jobs, in any order."""
    return digest([sorted(hashes), sorted(search)])


def sweep_name(recipe: str, keys: Iterable[str], identity: str) -> str:
    """Return the default name of a sweep: its recipe, the keys that vary, and its hash."""
    parts = [recipe] if recipe != "none" else []
    parts += keys
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:_LONGEST_NAME].strip("-._")
    return f"{readable or 'sweep'}-{identity[:8]}"


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a value in plain containers."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
