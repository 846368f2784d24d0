"""Mixed precision: where a forward pass runs in half precision, and the scale of an fp16 loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from runner.booster.optimizer import OptimizerWrapper
    from runner.parallel.pipeline import Pipeline

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


SMALLEST_SCALE = 2.0**-24
"""Of an fp16 loss: the smallest fp16 number. Below, a loss that is never finite would reach 0."""


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype of a forward pass under precision ``name``, None for full precision.

    Raises:
        ValueError: an unknown name.
    """
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"unknown precision {name!r}: use {', '.join(DTYPES)}")
    return DTYPES[name]


class ModelWrapper(nn.Module):
    """A boosted model: the forward pass runs under autocast and returns float32 outputs.

    Args:
        module: what runs, the user's model or its data-parallel wrapper.
        model: the user's model.
        dtype: half precision of the forward pass, or None.
        pipeline: runs batches instead, where the model is cut into stages.

    Attributes:
        renamed: the name of a parameter in the whole model, by another one that it has here.
        names: all names in the state dict of the whole model; for each the first one of the same
            tensor.
        optimizer: what was boosted with the model, if anything.
    """

    renamed: Mapping[str, str]
    names: Mapping[str, str]
    optimizer: OptimizerWrapper | None

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
        # In a list, so that the model is not registered a second time.
        self._model = [model]
        self.dtype = dtype
        self.renamed, self.names, self.optimizer = {}, {}, None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Copy the model, for an average of its weights: without optimizer and without DDP.

        Raises:
            TypeError: the model is sharded by ``fully_shard`` or cut into stages.
        """
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
        """The user's model."""
        return self._model[0]

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device_type, self.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Half-precision outputs become float32, so that losses are exact.

        Raises:
            RuntimeError: the model is cut into stages; no rank has all of it.
        """
        if self.pipeline is not None:
            raise RuntimeError("this model is cut into stages: call booster.execute_pipeline")
        if self.dtype is None:
            outputs = self.module(*args, **kwargs)
        else:
            device = next(self.module.parameters()).device.type
            with self.autocast(device):
                outputs = self.module(*args, **kwargs)
            outputs = tree_map_only(Tensor, _to_float32, outputs)
        if self.optimizer is not None and torch.is_grad_enabled():
            # DDP decides in the forward pass whether a backward pass synchronises.
            held = self.optimizer.accumulating and isinstance(self.module, DistributedDataParallel)
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor):
                    self.optimizer.watch(output, held)
        return outputs


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass
class LossScale:
    """The moving scale of an fp16 loss (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    One scale holds for a whole accumulation window: it moves in :meth:`update` alone, which is
    called once an optimizer step, after the gradients were unscaled with the scale that the
    backward passes used.

    Attributes:
        scale: factor on the loss now.
        growth_interval: finite steps in a row after which the scale is doubled.
        finite_steps: finite steps since the scale last moved.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow, double it after enough finite steps."""
        if not finite:
            self.scale = max(self.scale * self.backoff, SMALLEST_SCALE)
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale *= self.growth
            self.finite_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and count of finite steps."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where :meth:`state_dict` left off."""
        self.scale, self.finite_steps = state["scale"], state["finite_steps"]
