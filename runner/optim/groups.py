"""Parameter groups of an optimizer, by patterns of parameter names."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

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
            ``{"head.*": {"lr": 0.01}}``. The first pattern that matches a name counts.
        no_decay: set ``weight_decay`` to 0 for vectors, scalars and weights of embeddings, unless
            the pattern of the parameter sets it.

    Raises:
        GroupError: a pattern matches no parameter, or only names that an earlier one matches.
    """
    without_decay = _without_decay(model) if no_decay else set()
    used: set[str] = set()
    groups: dict[tuple[str | None, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        settings = {} if pattern is None else dict(patterns[pattern])
        drops_decay = id(parameter) in without_decay and "weight_decay" not in settings
        if pattern is not None:
            used.add(pattern)
        if drops_decay:
            settings["weight_decay"] = 0.0
        group = groups.setdefault((pattern, drops_decay), {"params": [], **settings})
        group["params"].append(parameter)
    for pattern in patterns:
        if pattern not in used:
            raise GroupError(_why_unused(pattern, model))
    return list(groups.values())


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


def require_settings(optimizer: Optimizer, patterns: Mapping[str, Settings]) -> None:
    """Refuse a setting that ``optimizer`` does not have: torch would ignore it."""
    for pattern, settings in patterns.items():
        for name in settings:
            if name not in optimizer.defaults:
                near = did_you_mean(name, optimizer.defaults)
                known = ", ".join(sorted(optimizer.defaults))
                raise GroupError(
                    f"{name!r} of {pattern!r} is no setting of {type(optimizer).__name__}{near}  "
                    f"(settings: {known})"
                )
