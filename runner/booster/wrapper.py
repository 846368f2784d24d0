"""The wrapper of a boosted model, and the record of which models were boosted."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

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
        self.module = module
        self.pipeline = pipeline
        # In a list, so that the model is not registered as a submodule again.
        self._model = [model]
        self.dtype = dtype
        self.renamed: Mapping[str, str] = {}
        self.names: Mapping[str, str] = {}
        self.optimizer: OptimizerWrapper | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Copy the model without its optimizer and without DDP, for an average of its weights."""
        sharded = any(isinstance(module, FSDPModule) for module in self.modules())
        if sharded or self.pipeline is not None:
            how = "sharded over ranks" if sharded else "cut into stages"
            raise TypeError(
                f"a model that is {how} cannot be copied: for an average of its weights, copy the "
                "model before it is boosted and boost the copy as well"
                + (
                    ": average, *_ = booster.boost(AveragedModel(net)), and in each step "
                    "average.unwrap().update_parameters(model.unwrap())"
                    if sharded
                    else ", or average what booster.state_dict returns"
                )
            )
        for module in self.unwrap().modules():
            for value in vars(module).values():
                if isinstance(value, dist.ProcessGroup):
                    memo[id(value)] = value
        model = copy.deepcopy(self.unwrap(), memo)
        copied = ModelWrapper(model, model, self.dtype)
        copied.renamed, copied.names = self.renamed, self.names
        return copied

    def unwrap(self) -> nn.Module:
        """Return the user's model."""
        return self._model[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Half-precision outputs are converted to float32, so that losses are
        exact.
        """
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
            for output in [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs):
                if isinstance(output, Tensor):
                    self.optimizer.watch(output, held)
        return outputs


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def names_of(model: nn.Module) -> dict[str, str]:
    """Return each name in the state dict of ``model``, with the first name of its tensor."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: first.setdefault(id(t), name) for name, t in named if isinstance(t, Tensor)}


def require_new(models: Sequence[nn.Module], *, rewrappable: bool) -> None:
    """Refuse to boost a model twice."""
    if rewrappable and any(model in wrappers for model in models):
        gc.collect()  # A Trainer and its wrapper refer to each other.
    for model in models:
        known = wrappers.get(model)
        boosted = known is not None and not (rewrappable and known() is None)
        if boosted or isinstance(model, ModelWrapper):
            raise ValueError(
                f"this {type(model).__name__} is boosted already: boost a model once, with all its "
                "optimizers: booster.boost(model, [first, second], ...); to start anew, build the "
                "model anew"
            )
