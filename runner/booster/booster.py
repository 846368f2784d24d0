"""The Booster: ties model, optimizer, criterion, dataloader and scheduler to a plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from runner.booster.optimizer import Nonfinite, OptimizerWrapper
from runner.booster.plugin import Plugin, SinglePlugin
from runner.booster.precision import LossScale, ModelWrapper, dtype_of


class Booster:
    """Boosts the parts of a training loop; the loop itself stays the user's.

    Args:
        mixed_precision: ``bf16``, ``fp16``, ``fp32`` or None. fp16 scales the loss.
        plugin: how the model is spread over ranks; one process by default.
        loss_scale: the fp16 scale to use instead of the default one.
        nonfinite: what the optimizer does with a gradient that is not finite.

    Raises:
        ValueError: an unknown precision.

    Example:
        >>> booster = Booster(mixed_precision="bf16")
        >>> model, optimizer, criterion, loader, scheduler = booster.boost(
        ...     model, optimizer, criterion, loader, scheduler
        ... )
        >>> for inputs, targets in loader:
        ...     booster.backward(criterion(model(inputs), targets), optimizer)
        ...     optimizer.clip_grad_by_norm(max_norm=0.1)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        plugin: Plugin | None = None,
        loss_scale: LossScale | None = None,
        nonfinite: Nonfinite = "skip",
    ) -> None:
        self.dtype = dtype_of(mixed_precision)
        self.plugin = SinglePlugin() if plugin is None else plugin
        self.loss_scale = loss_scale
        if self.loss_scale is None and mixed_precision == "fp16":
            self.loss_scale = LossScale()
        self.nonfinite = nonfinite

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[ModelWrapper, Any, Any, Any, Any]:
        """Spread the model and wrap the optimizer.

        Returns:
            What was given, in the same order: the model as :class:`ModelWrapper`, the optimizer (if
            any) as :class:`~runner.booster.optimizer.OptimizerWrapper`, the rest as it was.
        """
        given = dict(model.named_parameters())
        module, layout = self.plugin.configure(model)
        boosted = None
        if optimizer is not None:
            _rebind(optimizer, given, model)
            boosted = OptimizerWrapper(optimizer, layout, self.loss_scale, self.nonfinite)
        wrapped = ModelWrapper(module, model, self.dtype)
        return wrapped, boosted, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Backward pass of ``loss``, scaled under fp16."""
        optimizer.backward(loss)

    def no_sync(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Context of every microbatch of a window but its last: forward and backward inside.

        Args:
            model: the boosted model.
            optimizer: the boosted optimizer; given, it refuses to clip gradients that are not yet
                final.
        """
        return _accumulating(self.plugin.no_sync(model.module), optimizer)


def _rebind(optimizer: Optimizer, given: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Let ``optimizer`` hold what the plugin put in the place of its parameters.

    Raises:
        ValueError: the optimizer has taken a step already; its state is that of whole parameters.
    """
    now = dict(model.named_parameters())
    replaced = {id(old): now[name] for name, old in given.items() if now[name] is not old}
    if not replaced:
        return
    if optimizer.state:
        raise ValueError("boost the model before the first step: the optimizer has state already")
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(p), p) for p in group["params"]]
        if not isinstance(optimizer, Adam):  # AdamW is one; no other fused kernel takes DTensors
            group["fused"] = None


@contextmanager
def _accumulating(
    held: AbstractContextManager[Any], optimizer: OptimizerWrapper | None
) -> Iterator[None]:
    if optimizer is not None:
        optimizer.accumulating = True
    try:
        with held:
            yield
    finally:
        if optimizer is not None:
            optimizer.accumulating = False
