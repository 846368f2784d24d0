"""The Booster: adapts model, optimizer, criterion, dataloader and scheduler to a plugin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

from runner.booster import saved
from runner.booster.batch import batch_size, mapped, targets_of
from runner.booster.loss import WindowLoss
from runner.booster.nonfinite import LossScale, Nonfinite
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.optimizers import orthogonalized, require_safe
from runner.booster.plugin import ParallelModel, Plugin, SinglePlugin, TorchDDPPlugin
from runner.booster.plugin.base import dtype_of
from runner.booster.unchanged import BoostedParameters, require_known
from runner.booster.wrapper import (
    ModelWrapper,
    compiled_in_place,
    names_of,
    require_new,
    require_trainable,
    wrappers,
)
from runner.clip import Layout
from runner.clip.functional import register
from runner.clip.skip import SkipRule
from runner.config.plugin_section import SCHEDULES
from runner.parallel.collectives import on_any_rank
from runner.parallel.gradient_sync import Replicas, average, broadcast_model, in_turn, nothing

CRITERION = "criterion."
"""Prefix of the names of a criterion's parameters."""

Given = Mapping[str, Mapping[str, nn.Parameter]]
"""The parameters of each module before it was distributed, by prefix and name."""

_OWNER = (
    "Give boost (or Trainer) the module that owns it, as the criterion or in the model, or leave "
    "it out of the optimizer"
)


class Booster(saved.CheckpointIO):
    """Adapt the parts of a training loop to a plugin; the loop itself does not change.

    Args:
        mixed_precision: ``bf16``, ``fp16`` or ``fp32``; None for the precision of the plugin, or
            full precision if it has none. fp16 scales the loss.
        plugin: plugin that distributes the model over ranks; one process by default.
        loss_scale: fp16 scale to use instead of the default one.
        nonfinite: what the optimizer does if a gradient is not finite: ``skip`` the step, raise an
            ``error``, or ``ignore`` it.
        skip: rule that skips steps whose loss or gradient norm is a spike; None for no rule. Each
            boosted optimizer has a copy of its own, ``optimizer.skip``. See
            :class:`runner.SkipRule`.

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
        self.nonfinite, self.skip = nonfinite, skip
        self._window_loss: tuple[Any, WindowLoss] | None = None

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
            criterion: the loss function. The trainable parameters of a module are synchronised,
                counted and clipped with those of the model.
            dataloader: returned unchanged.
            lr_scheduler: returned unchanged.

        Returns:
            The arguments in the same order: the model as :class:`ModelWrapper`, the optimizers as
            one :class:`~runner.booster.optimizer.OptimizerWrapper`.

        Raises:
            ValueError: the model was boosted before, or an optimizer holds a parameter of neither
                module, has stepped already, or would take other steps.
        """
        model, plugin = compiled_in_place(model), self.plugin
        require_new(model, rewrappable=isinstance(plugin, SinglePlugin))
        parts = _trained_together(model, criterion)
        whole = isinstance(plugin, SinglePlugin | TorchDDPPlugin)
        require_trainable(parts, dense="" if whole else type(plugin).__name__)
        given = {prefix: dict(part.named_parameters()) for prefix, part in parts.items()}
        names = names_of(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        owners = {id(p): prefix + n for prefix, named in given.items() for n, p in named.items()}
        require_known(optimizers, owners, _OWNER)
        unscaled = {owners[id(parameter)] for parameter in orthogonalized(optimizers)}
        made = plugin.configure(model)
        parallel = {"": made}
        if CRITERION in parts:
            parallel[CRITERION] = _replicate(parts[CRITERION], plugin)
        wrapper = ModelWrapper(made.module, model, self.dtype, made.pipeline)
        wrapper.renamed, wrapper.names = made.renamed, names
        boosted = None
        if optimizers:
            _rebind(optimizers, given, parts, parallel)
            for each in optimizers:
                require_safe(each, parallel.values(), plugin)
            one = _together(made, parallel.get(CRITERION))
            one.layout.leave_unscaled(unscaled)
            boosted = wrapper.optimizer = OptimizerWrapper(
                optimizers,
                one,
                self.loss_scale,
                self.nonfinite,
                plugin.max_norm,
                copy.deepcopy(self.skip),
                partial(plugin.start_mean_over_data, device=one.layout.device),
                BoostedParameters(parts, made.renamed, plugin),
            )
        if made.pipeline is not None:
            made.pipeline.autocast(self.dtype)
        wrappers[model] = ref(wrapper)
        # Without an optimizer, gradients are final under DDP alone, or if nothing has to be done.
        if boosted is not None or not (
            made.sync_grads is nothing or isinstance(made.module, DistributedDataParallel)
        ):
            # What users may give to a function that clips, also parameters that were replaced.
            owned = [wrapper, made.module, *parts.values()]
            held: list[Tensor] = [p for named in given.values() for p in named.values()]
            held += [p for part in parts.values() for p in part.parameters()]
            if boosted is not None:
                held += [shard.param for shard in boosted.layout.shards]
            register(boosted, [*owned, *held])
        return wrapper, boosted, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Run the backward pass of ``loss``, scaled under fp16."""
        optimizer.backward(loss)

    @contextmanager
    def no_sync(
        self, model: ModelWrapper, optimizer: OptimizerWrapper | None = None
    ) -> Iterator[None]:
        """Return a context in which gradients accumulate without synchronisation.

        Run the forward and backward pass of each microbatch of a window but the last inside it. The
        optimizer, by default the one of the model, refuses to clip gradients that are not final.
        """
        boosted = optimizer or model.optimizer
        with (
            nullcontext() if boosted is None else boosted.accumulate(),
            self.plugin.no_sync(model.module),
        ):
            yield

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
            return_outputs: whether to return outputs; in training this costs another forward pass.

        Returns:
            ``loss``, the mean over the batch (0 without samples), and ``outputs`` [B, ...] on the
            last stage. Both are None on other stages and if they were not asked for.
        """
        pipeline = model.pipeline
        if pipeline is None:
            raise RuntimeError(
                "the model is in one piece: give PipelineParallelPlugin two ranks or more"
            )
        known = self._window_loss
        if known is None or known[0] is not criterion:  # kept, so that it is checked only once
            known = self._window_loss = criterion, WindowLoss(model.unwrap(), criterion)
        window_loss, batch = known[1], next(data_iter)
        divisor = window_loss.divisor(window_loss.items(batch).items)
        inputs, targets = window_loss.call(batch).only_tensor(), targets_of(batch)
        loss: Tensor | None = None
        outputs: Tensor | None = None
        if optimizer is not None:
            self.before_pipeline(model, window_loss, batch)
            factor = optimizer.begin_backward(1.0 / divisor)

            def summed(out: Tensor, at: slice) -> Tensor:
                part = mapped(batch, itemgetter(at))
                return window_loss.sum(out, part, window_loss.items(part).items) * factor

            mean = pipeline.train(inputs, summed) / (factor * divisor)
            optimizer.add_loss(mean)
            optimizer.end_backward()
            loss = mean if pipeline.last else None
        if optimizer is None or return_outputs:
            outputs = pipeline.evaluate(inputs)
            if optimizer is None and outputs is not None:
                loss = criterion(outputs, targets) if batch_size(batch) else outputs.sum() * 0.0
        return {
            "loss": loss if return_loss else None,
            "outputs": outputs if return_outputs else None,
        }

    def before_pipeline(self, model: ModelWrapper, loss: WindowLoss, batch: Any) -> None:
        """Check that a batch may be trained in microbatches; every rank has to call this.

        For a criterion whose divisor is not known, the first batch has one forward pass more.
        """
        if model.optimizer is not None and model.optimizer.boosted is not None:
            model.optimizer.boosted.require_same()
        if not loss.unproved or model.pipeline is None:
            return
        loss.unproved = False
        inputs = loss.call(batch).only_tensor()
        with torch.random.fork_rng([inputs.device] if inputs.device.type == "cuda" else []):
            outputs = model.pipeline.evaluate(inputs)
            off = outputs is not None and not loss.adds_up(outputs, batch)
        # Only the last stage knows, and all ranks stop.
        if any(on_any_rank([off], dist.group.WORLD)):
            raise ValueError(
                "the mean loss of a batch is not that of its samples, and a pipeline computes it "
                "in microbatches: give the criterion a method loss_items(targets) that returns "
                "what its mean divides by, or use torch.nn.CrossEntropyLoss"
            )


def _trained_together(model: nn.Module, criterion: Any) -> dict[str, nn.Module]:
    """Return the model, and a criterion with parameters, by the prefix of their names."""
    parts = {"": model}
    if isinstance(criterion, nn.Module):
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = [p for p in criterion.parameters() if p.requires_grad]
        shared = [names[parameter] for parameter in trained if parameter in names]
        if shared and len(shared) < len(trained):
            raise ValueError(
                f"{shared[0]} is also a parameter of the criterion, which has others of its own: "
                "keep the model out of the criterion"
            )
        if trained and not shared:
            parts[CRITERION] = criterion
    return parts


def _replicate(criterion: nn.Module, plugin: Plugin) -> ParallelModel:
    """Replicate a criterion on every rank, with gradients averaged over data-parallel ranks."""
    schedule = getattr(plugin, "schedule", "gpipe")
    if SCHEDULES[schedule].splits_backward and getattr(plugin, "stage_count", 1) > 1:
        raise ValueError(
            f"{schedule} takes no gradient of a criterion's parameters: choose schedule='1f1b'"
        )
    whole = ParallelModel(criterion, Layout.of_model(criterion))
    world = dist.group.WORLD
    if plugin.world_size == 1 or world is None:
        return whole
    broadcast_model(criterion, world)
    # All of them: a frozen one may be unfrozen later.
    replicas = Replicas(list(criterion.parameters()), world, plugin.data_size)

    def sync_grads() -> None:
        # Ranks that read the same samples have equal gradients, of which one counts.
        for parameter in () if plugin.reports_metrics else replicas.parameters:
            parameter.grad = None
        average(replicas)

    return replace(whole, sync_grads=sync_grads)


def _together(model: ParallelModel, criterion: ParallelModel | None) -> ParallelModel:
    """Return both as one, which one optimizer step trains."""
    if criterion is None:
        return model
    own = frozenset(id(shard.param) for shard in criterion.layout.shards)
    # The gradients of a criterion are final after the backward pass.
    return replace(
        model,
        layout=Layout.union({"": model.layout, CRITERION: criterion.layout}),
        sync_grads=in_turn(model.sync_grads, criterion.sync_grads),
        steps=None if model.steps is None else model.steps | own,
    )


def _rebind(
    optimizers: Sequence[Optimizer],
    given: Given,
    parts: Mapping[str, nn.Module],
    parallel: Mapping[str, ParallelModel],
) -> None:
    """Replace the parameters of optimizers by those that this rank steps after distribution."""
    replaced: dict[int, list[nn.Parameter]] = {}
    for prefix, made in parallel.items():
        now: dict[str, list[nn.Parameter]] = {}
        for own, parameter in parts[prefix].named_parameters():
            if made.steps is None or id(parameter) in made.steps:
                now.setdefault(made.renamed.get(own, own), []).append(parameter)
        replaced |= {id(old): now.get(name, []) for name, old in given[prefix].items()}
    if all([id(p) for p in new] == [old] for old, new in replaced.items()):
        return
    for optimizer in optimizers:
        if optimizer.state:
            raise ValueError("boost the model before the first step: the optimizer has state")
        for group in optimizer.param_groups:
            group["params"] = [new for p in group["params"] for new in replaced[id(p)]]
            kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
            if len(kinds) > 1:
                # No kernel accepts DTensors together with plain tensors (those of a criterion).
                group["fused"] = group["foreach"] = False
            elif True in kinds and not isinstance(optimizer, Adam):
                group["fused"] = None  # Only fused Adam, and AdamW, accept DTensors.
