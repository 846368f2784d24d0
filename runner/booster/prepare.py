"""Preparation and checks of a model before a plugin distributes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Replace the wrappers of :func:`torch.compile` by modules that are compiled in place.

    A wrapper adds ``_orig_mod.`` to the names of all parameters inside it, which the patterns of a
    plan, the state dict and names in messages would not match. The model itself may be wrapped, so
    use the one that is returned.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child is not model._modules.get("_orig_mod"):
                parent._modules[name] = _unwrapped(child)
    return _unwrapped(model)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module._modules.get("_orig_mod")
    if inner is None or not hasattr(module, "dynamo_ctx"):
        return module
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return inner


def require_dense(model: nn.Module, plugin: str) -> None:
    """Refuse a layer with sparse gradients, which cannot be sharded or summed over ranks."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or type(module).__name__} has sparse gradients, which {plugin} cannot "
                "synchronise: build the layer with sparse=False"
            )


def require_real(parts: Mapping[str, nn.Module]) -> None:
    """Refuse complex parameters, before a plugin fails on them."""
    for prefix, part in parts.items():
        for name, parameter in part.named_parameters():
            if parameter.is_complex():
                raise TypeError(
                    f"{prefix}{name} is complex: clipping is defined on real parameters"
                )
