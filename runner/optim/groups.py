"""Parameter groups of an optimizer, by patterns of parameter names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.config.notation import first_few
from runner.config.problem import Suggesting, did_you_mean, near_name

Settings = Mapping[str, Any]


class GroupError(Suggesting, ValueError):
    """A pattern that matches no parameter, or a setting that the optimizer does not have."""


def parameter_groups(
    model: nn.Module, patterns: Mapping[str, Settings], no_decay: bool = False
) -> list[dict[str, Any]]:
    """Return groups of all parameters of a model, as ``torch.optim`` takes them.

    Args:
        model: the whole model.
        patterns: settings of the parameters whose names match a glob, by glob, such as
            ``{"head.*": {"lr": 0.01}}``; ``{"clip": False}`` leaves them out of clipping. The first
            pattern that matches a name counts. Parameters that none matches are the first group.
        no_decay: set ``weight_decay`` to 0 for vectors, scalars and weights of embeddings, unless
            the pattern of the parameter sets it.

    Raises:
        GroupError: a pattern matches no parameter, or only names that an earlier one matches.
    """
    without_decay = _without_decay(model) if no_decay else set()
    groups = _empty_groups(patterns)
    for name, parameter in model.named_parameters():
        matching = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        pattern_of_name = matching[0] if matching else None
        of_pattern = [group for group in groups if group.pattern == pattern_of_name]
        # The last one is without decay, unless the pattern sets it.
        group = of_pattern[-1] if id(parameter) in without_decay else of_pattern[0]
        group.parameters.append(parameter)
    used = {group.pattern for group in groups if group.parameters}
    for pattern in patterns:
        if pattern not in used:
            raise GroupError(_why_unused(pattern, model))
    return [{"params": group.parameters, **group.settings} for group in groups if group.parameters]


@dataclass
class _Group:
    pattern: str | None
    settings: Settings
    parameters: list[nn.Parameter] = field(default_factory=list)


def _empty_groups(patterns: Mapping[str, Settings]) -> list[_Group]:
    """Return a group for each pattern and one for no pattern, each also without decay."""
    groups = [_Group(None, {}), _Group(None, {"weight_decay": 0.0})]
    for pattern, settings in patterns.items():
        groups.append(_Group(pattern, settings))
        if "weight_decay" not in settings:
            groups.append(_Group(pattern, {**settings, "weight_decay": 0.0}))
    return groups


def _why_unused(pattern: str, model: nn.Module) -> str:
    names = [name for name, _ in model.named_parameters()]
    if fnmatch.filter(names, pattern):
        return f"{pattern!r} matches only parameters of earlier patterns: put it before them"
    near = did_you_mean(pattern, names)
    return f"{pattern!r} matches no parameter{near}  (parameters: {first_few(names, 8)})"


def _without_decay(model: nn.Module) -> set[int]:
    """Return the ids of vectors, scalars and weights of embeddings."""
    undecayed = {id(parameter) for parameter in model.parameters() if parameter.ndim < 2}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            undecayed.add(id(module.weight))
    return undecayed


def require_settings(
    optimizer: Optimizer, patterns: Mapping[str, Settings], no_decay: bool = False
) -> None:
    """Refuse settings that ``optimizer`` does not have or take: torch would not check them."""
    kind = type(optimizer).__name__
    if no_decay and "weight_decay" not in optimizer.defaults:
        raise GroupError(f"{kind} has no weight_decay")
    for pattern, settings in patterns.items():
        for name, value in settings.items():
            if name == "clip":
                _require_left_out(pattern, value)
                continue
            if name not in optimizer.defaults:
                meant = did_you_mean(name, optimizer.defaults)
                settings_of_kind = ", ".join(sorted(optimizer.defaults))
                raise GroupError(
                    f"{name!r} of {pattern!r} is no setting of {kind}{meant}  "
                    f"(settings: {settings_of_kind})",
                    near_name(name, optimizer.defaults),
                )
            if _is_number(optimizer.defaults[name]) and not _is_number(value):
                raise GroupError(f"{name} of {pattern!r} must be a number, not {value!r}")
        _require_accepted(optimizer, pattern, settings)


def _require_left_out(pattern: str, value: Any) -> None:
    """Refuse thresholds of groups, which ``no_decay`` may divide: ``clip=groups`` has them."""
    if value is not False:
        raise GroupError(
            f"clip of {pattern!r} must be false, not {value!r}: clip=groups gives patterns "
            "thresholds of their own"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_accepted(optimizer: Optimizer, pattern: str, settings: Settings) -> None:
    """Make an optimizer of these settings, which checks their ranges."""
    arguments = {**optimizer.defaults, **settings}
    arguments.pop("clip", None)
    try:
        type(optimizer)([nn.Parameter(torch.zeros(1))], **arguments)
    except ValueError as error:
        raise GroupError(f"{pattern!r}: {error}") from None
    except (TypeError, RuntimeError):  # its arguments have other names than its settings
        return
