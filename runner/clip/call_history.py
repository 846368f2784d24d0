"""What calls of ``apply_gradient_clipping`` remember of a model, so that a history grows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from runner.clip.mode import ClipMode, build, memory_of
from runner.config.modes import Mode
from runner.gradients.layout import Layout


@dataclass
class _CalledMode:
    """A mode that calls have clipped by, and the arguments and the layout it was made for."""

    kind: str | type[Mode]
    options: dict[str, Any]
    layout: Layout
    mode: ClipMode


class CallHistory:
    """The modes of all calls on one model, or on one list of parameters.

    A call finds its mode again by the kind of the mode and its options. A threshold is no part of
    this: a call with another threshold goes on with the same history.
    """

    def __init__(self) -> None:
        self._called: dict[str, _CalledMode] = {}
        self._states: dict[str, Any] = {}  # of modes that were not called since they were loaded

    def mode(self, kind: str | type[Mode], options: dict[str, Any], layout: Layout) -> ClipMode:
        """Return the mode of a call, bound to ``layout``, with the history of earlier calls."""
        for called in self._called.values():
            if called.kind == kind and called.options == options and called.layout is layout:
                return called.mode
        mode = build(kind, **options)
        mode.bind(layout)
        key = key_of(mode)
        earlier = self._called.get(key)
        state = self._states.pop(key, None) if earlier is None else earlier.mode.state_dict()
        if state is not None:
            mode.load_state_dict(_without_thresholds(state))
        self._called[key] = _CalledMode(kind, copy.deepcopy(options), layout, mode)
        return mode

    def remembers(self, mode: ClipMode) -> bool:
        """Return whether ``mode`` has a history here."""
        return key_of(mode) in self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each mode that has a history."""
        states = dict(self._states)
        for key, called in self._called.items():
            state = called.mode.state_dict()
            if _has_history(state):
                states[key] = state
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; other histories are forgotten."""
        self._called = {}
        self._states = {_key_of_now(key): value for key, value in state.items()}


def _key_of_now(key: str) -> str:
    """Return a key as :func:`key_of` does; earlier versions saved ``history`` as true or false."""
    if key.startswith(("AdaGCClip(", "PercentileClip(", "ZScoreClip(")):
        key = key.replace("history=True", "history='clipped'")
        key = key.replace("history=False", "history='raw'")
    name, _, options = key.removesuffix(")").partition("(")
    return _key(name, _divided(options))


def _divided(options: str) -> list[str]:
    """Divide the options of a key at the commas that are not inside of brackets or quotes."""
    parts = [""]
    depth = 0
    quoted = False
    for character in options:
        quoted ^= character == "'"
        depth += (character in "([{") - (character in ")]}") if not quoted else 0
        if character == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _key(name: str, options: Iterable[str]) -> str:
    """Return a key whose options are sorted: their order has changed with versions."""
    return f"{name}({', '.join(sorted(options))})"


def key_of(mode: ClipMode) -> str:
    """Return the class and the options of a mode, without thresholds, as text."""
    options: dict[str, Any] = {}
    for option in fields(mode):
        if option.init and option.name != "threshold":
            options[option.name] = getattr(mode, option.name)
    texts = [f"{name}={_text(value)}" for name, value in options.items()]
    return _key(_class_name(type(mode)), texts)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        items = [(k, v) for k, v in value.items() if not _is_threshold(k, v)]
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if isinstance(value, type):
        return _class_name(value)
    return repr(value)


def _class_name(kind: type) -> str:
    ours = kind.__module__.startswith("runner.")  # whose modules may move
    return kind.__qualname__ if ours else f"{kind.__module__}.{kind.__qualname__}"


def _is_threshold(name: Any, value: Any) -> bool:
    return name == "threshold" and not isinstance(value, Mapping)


def _without_thresholds(state: Any) -> Any:
    """Return a state of a mode, and of modes inside of it, without thresholds."""
    if not isinstance(state, dict):
        return state
    return {k: _without_thresholds(v) for k, v in state.items() if not _is_threshold(k, v)}


def _has_history(state: Any) -> bool:
    """Return whether the state of a mode, or of a mode inside of it, has more than a threshold."""
    if not isinstance(state, dict):
        return False
    if memory_of(state):
        return True
    return any(_has_history(value) for value in state.values())
