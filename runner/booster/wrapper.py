"""The wrapper of a boosted model; what a model has to be before it is boosted."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from runner.parallel.hooks import held_tensors

if TYPE_CHECKING:
    from runner.booster.optimizer import OptimizerWrapper
    from runner.parallel.pipeline import Pipeline

wrappers: WeakKeyDictionary[nn.Module, ReferenceType[ModelWrapper]] = WeakKeyDictionary()
"""The wrapper of each model that was boosted, by the user's model."""


class ModelWrapper(nn.Module):
    """A boosted model: the forward pass runs under autocast and returns float32 outputs.

    Attributes:
        renamed: name in the whole model of each parameter that has another name on this rank.
        names: each name in the state dict of the whole model, with the first name of its tensor.
        optimizer: optimizer that was boosted with the model, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        dtype: torch.dtype | None,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self.module, self.dtype, self.pipeline = module, dtype, pipeline
        # In a list, so that the model is not registered as a submodule again.
        self._model = [model]
        self.renamed: Mapping[str, str] = {}
        self.names: Mapping[str, str] = {}
        self.optimizer: OptimizerWrapper | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Copy the model without its optimizer and without DDP, for an average of its weights."""
        sharded = any(isinstance(module, FSDPModule) for module in self.modules())
        if sharded or self.pipeline is not None:
            raise TypeError(
                "a model that is sharded or cut into stages cannot be copied: for an average of "
                "its weights, average what booster.state_dict returns, or boost a copy as well"
            )
        for module in self.unwrap().modules():
            groups = [v for v in vars(module).values() if isinstance(v, dist.ProcessGroup)]
            memo.update({id(group): group for group in groups})
        model = copy.deepcopy(self.unwrap(), memo)
        copied = ModelWrapper(model, model, self.dtype)
        copied.renamed, copied.names = self.renamed, self.names
        return copied

    def unwrap(self) -> nn.Module:
        """Return the user's model."""
        return self._model[0]

    def roots(self) -> list[nn.Module]:
        """Return the model, and its pipeline stages on this rank: what ``fully_shard`` shards."""
        pipeline = self.pipeline
        return [self.unwrap(), *(() if pipeline is None else pipeline.stages.values())]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; half-precision outputs become float32, so that losses are exact."""
        if self.pipeline is not None:
            raise RuntimeError("this model is cut into stages: call booster.execute_pipeline")
        boosted = None if self.optimizer is None else self.optimizer.boosted
        if boosted is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            boosted.require_same()
        if self.dtype is None:
            outputs = self.module(*args, **kwargs)
        else:
            device = next(self.module.parameters()).device.type
            with torch.autocast(device, self.dtype):
                outputs = self.module(*args, **kwargs)
            outputs = tree_map_only(Tensor, _to_float32, outputs)
        if self.optimizer is not None and torch.is_grad_enabled():
            # DDP decides in the forward pass whether the backward pass synchronises.
            held = self.optimizer.accumulating and isinstance(self.module, DistributedDataParallel)
            for output in held_tensors(outputs):
                self.optimizer.watch(output, held)
        return outputs


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def names_of(model: nn.Module) -> dict[str, str]:
    """Return each name in the state dict of ``model``, with the first name of its tensor."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: first.setdefault(id(t), name) for name, t in named if isinstance(t, Tensor)}


def require_new(model: nn.Module, *, rewrappable: bool) -> None:
    """Refuse to boost a model twice; one that no plugin has changed may be once its wrapper is
    gone.
    """
    if rewrappable and model in wrappers:
        gc.collect()  # A Trainer and its wrapper refer to each other.
    gone = rewrappable and wrappers.get(model, lambda: None)() is None
    if (model in wrappers and not gone) or isinstance(model, ModelWrapper):
        raise ValueError(
            f"this {type(model).__name__} is boosted already: boost a model once, with all its "
            "optimizers: booster.boost(model, [first, second], ...); to start anew, build the "
            "model anew"
        )


def require_trainable(parts: Mapping[str, nn.Module], *, dense: str) -> None:
    """Refuse complex parameters, and sparse gradients under a plugin ``dense``, if one is named."""
    for prefix, part in parts.items():
        for name, parameter in part.named_parameters():
            if parameter.is_complex():
                raise TypeError(
                    f"{prefix}{name} is complex: clipping is defined on real parameters"
                )
        for name, module in part.named_modules() if dense else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ValueError(
                    f"{name or type(module).__name__} has sparse gradients, which {dense} cannot "
                    "synchronise: build the layer with sparse=False"
                )


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Replace the wrappers of :func:`torch.compile`, which add ``_orig_mod.`` to all names inside
    them, by modules that are compiled in place; return the model, which may be one.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child is not model._modules.get("_orig_mod"):
                parent._modules[name] = _uncompiled(child)
    return _uncompiled(model)


def _uncompiled(module: nn.Module) -> nn.Module:
    inner = module._modules.get("_orig_mod")
    if inner is None or not hasattr(module, "dynamo_ctx"):
        return module
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return inner
