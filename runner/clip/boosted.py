"""Which optimizer clips a model, or parameters, that a plugin has boosted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# For modules and parameters a weak reference to their optimizer, or "none" if they have none.
_boosted = WeakIdKeyDictionary()


def register(optimizer: Any, owned: Iterable[nn.Module | Tensor]) -> None:
    """Register the boosted optimizer, or None, which clips what was boosted together.

    It makes gradients final (``begin_clip()``) and clips them (``clip(mode)``) over its ``layout``.
    """
    for module_or_parameter in owned:
        _boosted[module_or_parameter] = "none" if optimizer is None else ref(optimizer)


def is_boosted(model: nn.Module) -> bool:
    """Return whether a plugin has distributed a model, or a part of it."""
    return any(module in _boosted for module in model.modules())


def owner_of(model: nn.Module | list[Tensor]) -> Any:
    """Return the boosted optimizer of a whole model, or of all its parameters, else None."""
    optimizer, is_whole = boosted_optimizer(model)
    return optimizer if is_whole else None


def boosted_optimizer(model: nn.Module | list[Tensor]) -> tuple[Any, bool]:
    """Return the optimizer that clips a model or parameters, and whether these are a whole model.

    None for a model that was not boosted.

    Raises:
        ValueError: the model was boosted without an optimizer, or the parameters belong to several
            models.
    """
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else model
    owned: list[nn.Module | Tensor] = list(parameters)
    if isinstance(model, nn.Module) and model in _boosted:
        owned.append(model)
    optimizer = _only_optimizer(owned)
    if optimizer is None:
        return None, False
    layout = optimizer.layout
    ids = {id(parameter) for parameter in parameters}
    ids_of_model = {id(shard.param) for shard in layout.shards}
    trained_ids = {id(shard.param) for shard in layout.shards if shard.param.requires_grad}
    is_whole = trained_ids <= ids
    if not ids <= ids_of_model:
        raise _not_one_model()
    if not is_whole and layout.group is not None:  # other ranks hold parts of what is missing
        raise _not_one_model()
    return optimizer, is_whole


def _only_optimizer(owned: Iterable[nn.Module | Tensor]) -> Any:
    """Return the optimizer of all these modules and parameters; None if they have none."""
    optimizers: dict[int, Any] = {}
    for module_or_parameter in owned:
        optimizer = _registered(module_or_parameter)
        optimizers[id(optimizer)] = optimizer
    if "none" in optimizers.values():
        raise ValueError(
            "this model was boosted without its optimizer, which synchronises gradients before "
            "they are clipped: booster.boost(model, optimizer)"
        )
    if len(optimizers) > 1:
        raise _not_one_model()
    return next(iter(optimizers.values()), None)


def _registered(module_or_parameter: nn.Module | Tensor) -> Any:
    optimizer = _boosted.get(module_or_parameter)  # type: ignore[no-untyped-call]
    return optimizer() if isinstance(optimizer, ReferenceType) else optimizer


def _not_one_model() -> ValueError:
    return ValueError(
        "these are not the parameters of one boosted model, which are clipped together: "
        "give the boosted model, or its parameters(); clip several models one by one, or "
        "boost one module that holds them all"
    )
