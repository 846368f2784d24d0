"""What is done to a model, and asked of it, before a plugin spreads it over ranks."""

from __future__ import annotations

from torch import nn


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Take compiled modules out of their wrappers, and let them compile themselves.

    :func:`torch.compile` wraps a module, so that the names of all parameters inside begin with
    ``_orig_mod.``: patterns of a plan, the state dict and names in messages would not match. After
    ``module.compile()`` they do.

    Args:
        model: a compiled model, or one with compiled parts; changed in place.

    Returns:
        The model without its wrapper.
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
    """Refuse a layer with sparse gradients, which cannot be sharded or added up over ranks.

    Args:
        model: the whole model.
        plugin: name of the plugin that is to spread it.

    Raises:
        ValueError: there is one; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or type(module).__name__} has sparse gradients, which {plugin} cannot "
                "synchronise: build the layer with sparse=False"
            )
