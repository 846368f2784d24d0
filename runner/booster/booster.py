"""The Booster: ties model, optimizer, criterion, dataloader and scheduler to a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from runner.booster.optimizer import Nonfinite, OptimizerWrapper
from runner.booster.parallel.gathering import gathered
from runner.booster.plugin import Plugin, SinglePlugin, Spread
from runner.booster.precision import LossScale, ModelWrapper, dtype_of


class Booster:
    """Boosts the parts of a training loop; the loop itself stays the user's.

    Args:
        mixed_precision: ``bf16``, ``fp16``, ``fp32`` or None: what the plugin says, else full
            precision. fp16 scales the loss.
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
        self.plugin = SinglePlugin() if plugin is None else plugin
        precision = mixed_precision or self.plugin.precision
        self.dtype = dtype_of(precision)
        self.loss_scale = loss_scale
        if self.loss_scale is None and precision == "fp16":
            start = self.plugin.initial_scale
            self.loss_scale = LossScale() if start is None else LossScale(start)
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
        names = _names_of(model)
        spread = self.plugin.configure(model)
        boosted = None
        if optimizer is not None:
            _rebind(optimizer, given, model, spread)
            boosted = OptimizerWrapper(
                optimizer,
                spread.layout,
                self.loss_scale,
                self.nonfinite,
                finish=spread.finish,
                publish=spread.publish,
                max_norm=self.plugin.max_norm,
            )
        if spread.pipeline is not None:
            spread.pipeline.autocast(self.dtype)
        wrapped = ModelWrapper(spread.module, model, self.dtype, spread.pipeline)
        wrapped.renamed, wrapped.names, wrapped.optimizer = spread.renamed, names, boosted
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
            optimizer: the boosted optimizer; by default the one that was boosted with the model. It
                refuses to clip gradients that are not yet final.
        """
        return _accumulating(self.plugin.no_sync(model.module), optimizer or model.optimizer)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: ModelWrapper,
        criterion: Callable[[Tensor, Any], Tensor],
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch through the stages: forward and, given an optimizer, backward.

        Args:
            data_iter: yields pairs (inputs [B, ...], targets [B, ...]), the same on all ranks of a
                pipeline.
            model: the boosted model.
            criterion: mean loss of (outputs, targets); taken of each microbatch and weighed by its
                samples.
            optimizer: the boosted optimizer. None: forward passes alone.
            return_loss: whether the loss is wanted.
            return_outputs: whether outputs are wanted; a further forward pass when training.

        Returns:
            ``loss``, the mean over the batch, and ``outputs`` [B, ...]: on the last stage, None on
            the others and where they are not wanted.

        Raises:
            RuntimeError: the model is not cut into stages.
            StepOrderError: the gradients of this step were made final or clipped already.
        """
        pipeline = model.pipeline
        if pipeline is None:
            raise RuntimeError(
                "the model is in one piece: give PipelineParallelPlugin two ranks or more"
            )
        inputs, targets = next(data_iter)
        samples = len(inputs)
        loss: Tensor | None = None
        outputs: Tensor | None = None
        if optimizer is not None:
            factor = optimizer.begin_backward(1.0 / samples)
            summed = pipeline.train(
                inputs,
                lambda out, at: criterion(out, targets[at]) * (len(targets[at]) * factor),
            )
            optimizer.end_backward()
            loss = summed / (factor * samples) if pipeline.last else None
        if optimizer is None or return_outputs:
            outputs = pipeline.evaluate(inputs)
            if optimizer is None and outputs is not None:
                loss = criterion(outputs, targets)
        return {
            "loss": loss if return_loss else None,
            "outputs": outputs if return_outputs else None,
        }

    def state_dict(self, model: ModelWrapper) -> dict[str, Tensor]:
        """The state dict of the whole model, on the host; every rank has to call it.

        Returns:
            What the user's model takes by ``load_state_dict``, on the first rank; nothing on the
            others.
        """
        whole = gathered(model.unwrap(), model.renamed)
        return {name: whole[first] for name, first in model.names.items()} if whole else {}


def _names_of(model: nn.Module) -> dict[str, str]:
    """All names in the state dict of ``model``; for each the first one of the same tensor."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: first.setdefault(id(t), name) for name, t in named if isinstance(t, Tensor)}


def _rebind(
    optimizer: Optimizer, given: dict[str, nn.Parameter], model: nn.Module, spread: Spread
) -> None:
    """Let ``optimizer`` hold what this rank steps of what took the place of its parameters.

    Raises:
        ValueError: the optimizer has taken a step already; its state is that of whole parameters.
    """
    names = {id(old): name for name, old in given.items()}
    now: dict[str, list[nn.Parameter]] = {}
    for own, parameter in model.named_parameters():
        if spread.steps is None or id(parameter) in spread.steps:
            now.setdefault(spread.renamed.get(own, own), []).append(parameter)
    replaced = {key: now.get(name, []) for key, name in names.items()}
    if all([id(p) for p in new] == [old] for old, new in replaced.items()):
        return
    if optimizer.state:
        raise ValueError("boost the model before the first step: the optimizer has state already")
    split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [new for p in group["params"] for new in replaced.get(id(p), [p])]
        if split and not isinstance(optimizer, Adam):
            group["fused"] = None  # AdamW is an Adam; no other fused kernel takes DTensors.


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
