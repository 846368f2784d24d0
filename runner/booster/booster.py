"""The Booster: adapts model, optimizer, criterion, dataloader and scheduler to a plugin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.booster.batch import mapped
from runner.booster.loss import WindowLoss
from runner.booster.measurement import settle
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.optimizers import (
    orthogonalized,
    own_clips,
    require_safe,
    require_same_clips,
    unknown,
)
from runner.booster.plugin.base import Plugin, SinglePlugin, dtype_of
from runner.booster.replaced import refuse_replaced
from runner.booster.step_order import LossScale, Nonfinite
from runner.booster.wrapper import BoostedParameters, ModelWrapper, checked, no_backward, wrappers
from runner.checkpoint.states import CheckpointIO
from runner.clip.boosted import register
from runner.clip.skip import SkipRule
from runner.parallel.collectives import raise_first
from runner.parallel.distribution import ParallelModel
from runner.parallel.gradient_sync import nothing


class Booster(CheckpointIO):
    """Adapt the parts of a training loop to a plugin; the loop itself does not change.

    Args:
        mixed_precision: ``bf16``, ``fp16`` or ``fp32``; None for the precision of the plugin, or
            full precision if it has none. fp16 scales the loss.
        plugin: plugin that distributes the model over ranks; one process by default.
        loss_scale: fp16 scale to use instead of the default one.
        nonfinite: what the optimizer does if a gradient is not finite: ``skip`` the step, raise an
            ``error``, or ``ignore`` it.
        skip: rule that skips steps whose gradient norm, or loss, is a spike; None for no rule. Each
            boosted optimizer has a copy of its own, ``optimizer.skip``. The loss is the mean over
            ranks of what :meth:`backward` was given. See :class:`runner.SkipRule`.

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
        skip: SkipRule | None = None,
    ) -> None:
        self.plugin = SinglePlugin() if plugin is None else plugin
        precision = mixed_precision or self.plugin.precision
        self.dtype = dtype_of(precision)
        self.loss_scale = loss_scale
        if self.loss_scale is None and precision == "fp16":
            self.loss_scale = LossScale(self.plugin.initial_scale or LossScale.scale)
        self.nonfinite = nonfinite
        self.skip = skip
        self._criterion: Any = None  # that ``_window_loss`` was made of
        self._window_loss: WindowLoss | None = None

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Distribute the model over the ranks and wrap the optimizer.

        Args:
            model: the model; two networks that one step trains are two modules of it.
            optimizer: the optimizer, or several that step together, each over its own parameters
                (:class:`torch.optim.Muon` for matrices and AdamW for the rest, say).
            criterion: the loss function, without parameters of its own.
            dataloader: returned unchanged.
            lr_scheduler: returned unchanged.

        Returns:
            The arguments in the same order: the model as :class:`ModelWrapper`, the optimizers as
            one :class:`~runner.booster.optimizer.OptimizerWrapper`.

        Raises:
            ValueError: the model was boosted before, the criterion has parameters, or an optimizer
                holds a parameter of another module, has stepped already, or would take other steps.
        """
        plugin = self.plugin
        name_of_plugin = "" if isinstance(plugin, SinglePlugin) else type(plugin).__name__
        model, names = checked(model, criterion, name_of_plugin)
        before = dict(model.named_parameters())
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        name_of_id = {id(parameter): name for name, parameter in before.items()}
        where = "Give boost (or Trainer) a model that owns it, or leave it out of the optimizer"
        raise_first(unknown(optimizers, name_of_id, where), alone=True)
        clips = own_clips(optimizers, name_of_id)
        if not isinstance(plugin, SinglePlugin):
            require_same_clips(clips)
        matrices = {name_of_id[id(parameter)] for parameter in orthogonalized(optimizers)}

        parallel_model = plugin.configure(model)
        renamed = parallel_model.renamed
        wrapper = ModelWrapper(model, self.dtype, renamed, names, parallel_model.pipeline)
        boosted = None
        if optimizers:
            parallel_model.rebind(optimizers, before, model)
            for plain in optimizers:
                require_safe(plain, parallel_model, plugin)
            parallel_model.layout.own_clips = clips
            parallel_model.layout.orthogonalized = frozenset(matrices)
            boosted = self._wrapped(optimizers, parallel_model, wrapper)
        elif parallel_model.sync_grads is not nothing:
            wrapper.watch = partial(no_backward, model)
        if parallel_model.pipeline is not None:
            for stage in parallel_model.pipeline.stages.values():
                stage.dtype = self.dtype
        wrappers[model] = ref(wrapper)
        if wrapper.watch is not None:  # Nothing makes gradients of several ranks final otherwise.
            # What users may give to a function that clips, also parameters that were replaced.
            shards = parallel_model.layout.shards
            parameters = [*before.values(), *model.parameters(), *(s.param for s in shards)]
            register(boosted, [wrapper, model, *parameters])
        refuse_replaced(before, model, renamed)
        return wrapper, boosted, criterion, dataloader, lr_scheduler

    def _wrapped(
        self, optimizers: Sequence[Optimizer], parallel_model: ParallelModel, model: ModelWrapper
    ) -> OptimizerWrapper:
        """Wrap the optimizers, and let the boosted model watch that its gradients are final."""
        alone = isinstance(self.plugin, SinglePlugin)
        model.boosted = BoostedParameters(model.module, parallel_model.renamed, alone)
        wrapper = OptimizerWrapper(
            optimizers,
            parallel_model,
            self.plugin,
            self.loss_scale,
            self.nonfinite,
            copy.deepcopy(self.skip),
            model.boosted.require_final,
        )
        model.optimizer = wrapper
        model.watch = wrapper.watch
        return wrapper

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Run the backward pass of ``loss``, scaled under fp16."""
        optimizer.backward(loss)

    def no_sync(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate without synchronisation.

        Run the forward and backward pass of each microbatch of a window but the last inside it. The
        optimizer, by default the one of the model, refuses to clip gradients that are not final.
        """
        boosted = optimizer or model.optimizer
        return nullcontext() if boosted is None else boosted.accumulate()

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
            data_iter: iterator over batches of one input [B, ...] and targets [B, ...] (pairs, or
                see :mod:`runner.booster.batch`), equal on all ranks of a pipeline.
            model: the boosted model.
            criterion: loss of (outputs, targets). The mean is taken over the items of all
                microbatches, see :class:`runner.booster.loss.WindowLoss`.
            optimizer: the boosted optimizer; None for forward passes only.
            return_loss: whether to return the loss.
            return_outputs: whether to return outputs.

        Returns:
            ``loss``, the mean over the batch (0 without samples), and ``outputs`` [B, ...] on the
            last stage. Both are None on other stages and if they were not asked for.
        """
        pipeline = model.pipeline
        if pipeline is None:
            raise RuntimeError("the model is in one piece: its plugin has no pipeline stages")
        window = self._window_loss_of(model, criterion)
        batch = next(data_iter)
        loss = None
        settle(window, model.unwrap(), [batch], pipeline, together=self.plugin.world_size > 1)
        window.begin_window()
        if optimizer is not None:
            kept: list[Tensor] | None = [] if return_outputs else None
            weight = 1.0 / window.divisor(window.items(batch).items)
            summed_loss = self.train_pipeline(
                model, optimizer, window, (batch, batch), weight, True, kept
            )
            loss = summed_loss * weight
            outputs = kept[0] if kept else None
        else:
            outputs = pipeline.evaluate(window.call(batch).only_tensor())
            if outputs is not None and return_loss:
                count = window.items(batch).items
                loss = window.sum(outputs, batch, count) * (1.0 / window.divisor(count))
        return {
            "loss": loss if return_loss and pipeline.last else None,
            "outputs": outputs if return_outputs else None,
        }

    def _window_loss_of(self, model: ModelWrapper, criterion: Any) -> WindowLoss:
        """Return the loss by a criterion, which is kept so that it is checked only once."""
        if self._window_loss is None or self._criterion is not criterion:
            self._criterion = criterion
            self._window_loss = WindowLoss(model.unwrap(), criterion)
        return self._window_loss

    def train_pipeline(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        loss: WindowLoss,
        batches: tuple[Any, Any],
        weight: float,
        counts: bool,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Train on a batch, on the host and on the device, in microbatches; return its summed loss.

        ``weight`` scales the gradients; ``counts``: whether this rank has samples; ``kept`` takes
        the outputs of the last stage.
        """
        host, batch = batches
        assert model.pipeline is not None
        if model.boosted is not None:
            model.boosted.require_same()
        inputs = loss.call(batch).only_tensor()
        factor = optimizer.begin_backward(weight)

        def summed(outputs: Tensor, samples: slice) -> Tensor:
            items = None
            if counts:
                items = loss.items(mapped(host, lambda tensor: tensor[samples])).items
            part = mapped(batch, lambda tensor: tensor[samples])
            return loss.sum(outputs, part, items) * factor

        total = model.pipeline.train(inputs, summed, kept) / factor
        optimizer.note_loss(total, weight)
        optimizer.end_backward()
        return total
