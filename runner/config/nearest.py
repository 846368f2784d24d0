"""The right name that is nearest to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``name`` most likely means, or None where none is near."""
    by_lower = {other.lower(): other for other in names}
    found = get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """The dotted ``keys`` that ``key`` most likely means, best first, at most three.

    A key whose last part is right but whose section is missing or wrong (``threshold`` for
    ``clip.threshold``) comes before one that is merely spelled alike.
    """
    keys = sorted(set(keys) - {key})
    last = _last(key)
    here = [other for other in keys if _last(other) == last]
    if here:
        return sorted(here, key=lambda other: -_likeness(key, other))[:3]
    scored = [(max(_likeness(key, other), _tail_likeness(key, other)), other) for other in keys]
    best = max(scored, default=(0.0, ""))[0]
    return [other for score, other in scored if score == best >= 0.6][:3]


def or_list(names: Iterable[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _last(key: str) -> str:
    return key.rpartition(".")[2].lower()


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _tail_likeness(key: str, other: str) -> float:
    # A slip in the last part alone; a little less than the same likeness of the whole key.
    return 0.95 * _likeness(_last(key), _last(other))
