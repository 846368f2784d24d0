"""Modes inside of a mode: how a configuration writes them, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from runner.config.modes import NAMES, Mode, ModeError, built_in, load, options_of
from runner.config.problem import MISSING, did_you_mean, or_list, unknown_key
from runner.config.values import CONFIG, Positive, Refusal, allowed

Found = tuple[str, str, Any]
"""An option below ``clip``, what is wrong with it, and its value."""

_CONFIG = ConfigDict(CONFIG, validate_default=True)  # type: ignore[misc]
_THRESHOLD = "a finite number greater than 0"
_OF_THE_WHOLE = (
    "norm_type",
    "nonfinite",
    "max_skips",
    "scales",
    "skip",
    "what_if",
    "when",
    "step_in_backward",
)


def written_out(node: Any) -> Any:
    """Return a mode as a mapping: a number is a limit of the norm, a name is that of a mode."""
    if isinstance(node, int | float) and not isinstance(node, bool):
        return {"mode": "norm", "threshold": node}
    if node is None or isinstance(node, str):
        return {"mode": node or "none"}
    return node


def kind_of(node: Mapping[str, Any]) -> type[Mode] | str:
    """Return the name of a mode that is written out, or the user's class."""
    target = node.get("_target_")
    return str(node["mode"]) if target is None else load(str(target))


def described_of(node: Mapping[str, Any]) -> type[Mode]:
    """Return the description of a mode that is written out, or the user's class."""
    kind = kind_of(node)
    return built_in(kind) if isinstance(kind, str) else kind


def arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mode that is written out."""
    return {key: value for key, value in node.items() if key not in ("mode", "_target_")}


def problems(where: str, given: Any, outer: Mapping[str, Any] | None = None) -> Iterator[Found]:
    """Yield what is wrong with a mode inside of another one."""
    outer = outer or {}
    node = written_out(given)
    if not isinstance(node, Mapping):
        yield where, "must be a mode, such as {mode:norm,threshold:1.0}, or a number or none", given
        return
    mode, target = node.get("mode", MISSING), node.get("_target_")
    if target is None and mode not in NAMES:
        must = f"must be one of {', '.join(NAMES)}"
        hint = f"no value given; {must}" if mode == MISSING else must + did_you_mean(mode, NAMES)
        yield f"{where}.mode", hint, mode
        return
    try:
        described = described_of(node)
    except ModeError as error:
        yield f"{where}._target_", str(error), target
        return
    own = arguments_of(node)
    if twice := next((name for name in outer if name in own), None):
        yield f"{where}.{twice}", f"is that of the mode around it: set clip.{twice}", own[twice]
        return
    options = {**own, **outer}
    checked = _model(described)  # type: ignore[arg-type]
    try:
        made = checked.model_validate({k: v for k, v in options.items() if v != MISSING})
    except ValidationError as error:
        found = {str(one["loc"][0]): one for one in error.errors(include_url=False)}
        for name, one in found.items():
            value = options.get(name, MISSING)
            yield f"{where}.{name}", _message(where, described, checked, name, one, value), value
        return
    yield from _conflicts(where, described, {name: getattr(made, name) for name in _own(checked)})


def _conflicts(where: str, described: type[Mode], options: dict[str, Any]) -> Iterator[Found]:
    """Yield options that are right one by one, but not together."""
    threshold, name = options["threshold"], _name(described)
    if described.info.needs_optimizer:
        message = (
            f"limits what the optimizer does, so it is no part of another mode: use clip={name}"
        )
        yield f"{where}.mode", message, name
        return
    if threshold is not None and not described.info.takes_threshold:
        yield f"{where}.threshold", f"mode {name} takes no threshold", threshold
    elif threshold is None and described.info.takes_threshold:
        yield f"{where}.threshold", f"mode {name} needs {_THRESHOLD}", MISSING
    else:
        for key, message, *value in described.conflicts(options):
            own = value[0] if value else options.get(key, MISSING)
            yield f"{where}.{key}", message, own


def _message(
    where: str, described: type[Mode], checked: type[BaseModel], name: str, one: Any, value: Any
) -> str:
    """Return what is wrong with one option, given pydantic's error."""
    if one["type"] == "extra_forbidden":
        if name in _OF_THE_WHOLE:
            return f"is the same for all modes inside of one: set clip.{name}"
        known = _own(checked)
        choices = [each for each in NAMES if name in options_of(built_in(each))]
        if choices and not did_you_mean(name, known):
            return f"is an option of mode {or_list(choices)}"
        place = f"clip.{where}"
        return unknown_key(f"{place}.{name}", [f"{place}.{each}" for each in known]).message
    field, cause = checked.model_fields[name], one.get("ctx", {}).get("error")
    may = allowed(field.annotation, field.metadata)
    if value == MISSING:
        return f"no value given; must be {may.text} ({field.description})"
    if isinstance(cause, Refusal):
        return str(cause)
    return f"must be {may.text}{did_you_mean(value, may.names)}"


def _own(checked: type[BaseModel]) -> list[str]:
    return list(checked.model_fields)


def _name(described: type[Mode]) -> str:
    named = (name for name in NAMES if built_in(name) is described)
    return next(named, described.__name__)


@cache
def _model(described: type[Mode]) -> type[BaseModel]:
    """Return the model of a mode's options, whose defaults are those of its class."""
    fields: dict[str, Any] = {
        name: (one.hint, one.default) for name, one in options_of(described).items()
    }
    made: type[BaseModel] = create_model(
        "Nested", __config__=_CONFIG, threshold=(Positive | None, described.threshold), **fields
    )
    return made
