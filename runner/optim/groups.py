"""Parameter groups of an optimizer, by patterns of parameter names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.config.notation import first_few
from runner.config.problem import did_you_mean

Settings = Mapping[str, Any]


class GroupError(ValueError):
    """A pattern that matches no parameter, or a setting that the optimizer does not have."""


def parameter_groups(
    model: nn.Module, patterns: Mapping[str, Settings], no_decay: bool = False
) -> list[dict[str, Any]]:
    """Return groups of all parameters of a model, as ``torch.optim`` takes them.

    Args:
        model: the whole model.
        patterns: for globs of parameter names the settings of these parameters, such as
            ``{"head.*": {"lr": 0.01}}``. The first pattern that matches a name counts. Parameters
            that none matches are the first group.
        no_decay: set ``weight_decay`` to 0 for vectors, scalars and weights of embeddings, unless
            the pattern of the parameter sets it.

    Raises:
        GroupError: a pattern matches no parameter, or only names that an earlier one matches.
    """
    without_decay = _without_decay(model) if no_decay else set()
    base: dict[str, Any] = {"params": []}
    base_without_decay: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    groups = [base, base_without_decay]
    of_pattern: dict[str, list[dict[str, Any]]] = {}
    for pattern, settings in patterns.items():
        of_pattern[pattern] = [
            {"params": [], **settings},
            {"params": [], "weight_decay": 0.0, **settings},
        ]
        groups += of_pattern[pattern]
    for name, parameter in model.named_parameters():
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        pair = [base, base_without_decay] if pattern is None else of_pattern[pattern]
        pair[id(parameter) in without_decay]["params"].append(parameter)
    for pattern, pair in of_pattern.items():
        if not any(group["params"] for group in pair):
            raise GroupError(_why_unused(pattern, model))
    return [group for group in groups if group["params"]]


def _why_unused(pattern: str, model: nn.Module) -> str:
    names = [name for name, _ in model.named_parameters()]
    if fnmatch.filter(names, pattern):
        return f"{pattern!r} matches only parameters of earlier patterns: put it before them"
    near = did_you_mean(pattern, names)
    return f"{pattern!r} matches no parameter{near}  (parameters: {first_few(names, 8)})"


def _without_decay(model: nn.Module) -> set[int]:
    """Return the ids of vectors, scalars and weights of embeddings."""
    found = {id(parameter) for parameter in model.parameters() if parameter.ndim < 2}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found.add(id(module.weight))
    return found


def require_settings(
    optimizer: Optimizer, patterns: Mapping[str, Settings], no_decay: bool = False
) -> None:
    """Refuse settings that ``optimizer`` does not have or take: torch would not check them."""
    kind = type(optimizer).__name__
    if no_decay and "weight_decay" not in optimizer.defaults:
        raise GroupError(f"{kind} has no weight_decay")
    for pattern, settings in patterns.items():
        for name, value in settings.items():
            if name not in optimizer.defaults:
                near = did_you_mean(name, optimizer.defaults)
                known = ", ".join(sorted(optimizer.defaults))
                raise GroupError(
                    f"{name!r} of {pattern!r} is no setting of {kind}{near}  (settings: {known})"
                )
            if _is_number(optimizer.defaults[name]) and not _is_number(value):
                raise GroupError(f"{name} of {pattern!r} must be a number, not {value!r}")
        _require_accepted(optimizer, pattern, settings)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_accepted(optimizer: Optimizer, pattern: str, settings: Settings) -> None:
    """Make an optimizer of these settings, which checks their ranges."""
    arguments = {**optimizer.defaults, **settings}
    try:
        type(optimizer)([nn.Parameter(torch.zeros(1))], **arguments)
    except ValueError as error:
        raise GroupError(f"{pattern!r}: {error}") from None
    except (TypeError, RuntimeError):  # its arguments have other names than its settings
        return
