"""The Booster: adapts model, optimizer, criterion, dataloader and scheduler to a plugin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from runner.booster import joint, saved
from runner.booster.batch import batch_size, mapped, targets_of
from runner.booster.checkpoint_io import CheckpointIO
from runner.booster.loss import WindowLoss
from runner.booster.nonfinite import Nonfinite
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.optimizers import orthogonalized, require_safe
from runner.booster.plugin import ParallelModel, Plugin, SinglePlugin, TorchDDPPlugin
from runner.booster.precision import LossScale, dtype_of
from runner.booster.prepare import compiled_in_place, require_dense, require_real
from runner.booster.unchanged import BoostedParameters
from runner.booster.wrapper import ModelWrapper, names_of, require_new, wrappers
from runner.clip import Layout
from runner.clip.functional import register
from runner.clip.skip import SkipRule
from runner.parallel.collectives import on_any_rank
from runner.parallel.final_gradients import Final
from runner.parallel.full_state_dict import load
from runner.parallel.gradient_sync import in_turn, nothing
from runner.parallel.sharding import reshard


class Booster(CheckpointIO):
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
        self.nonfinite = nonfinite
        self.skip = skip
        self._window_loss: tuple[Any, WindowLoss] | None = None

    def boost(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Distribute the model over the ranks and wrap the optimizer.

        Args:
            model: the model, or several models that one optimizer step trains together: their
                gradients have one norm.
            optimizer: the optimizer, or several that step together, each over its own parameters
                (:class:`torch.optim.Muon` for matrices and AdamW for the rest, say).
            criterion: the loss function. If it is a module with trainable parameters (a learned
                temperature), these are synchronised, counted and clipped with those of the model.
            dataloader: returned unchanged.
            lr_scheduler: returned unchanged.

        Returns:
            The arguments in the same order: the model as :class:`ModelWrapper` (several as a
            list), the optimizers as one :class:`~runner.booster.optimizer.OptimizerWrapper`, the
            others unchanged.

        Raises:
            ValueError: a model was boosted before, models share a parameter, an optimizer holds a
                parameter of none of these modules, or has stepped already.
            TypeError: a parameter is complex.
        """
        listed = [model] if isinstance(model, nn.Module) else list(model)
        models = [compiled_in_place(each) for each in listed]
        require_new(models, rewrappable=isinstance(self.plugin, SinglePlugin))
        parts = joint.named(models, criterion)
        require_real(parts)
        if not isinstance(self.plugin, SinglePlugin | TorchDDPPlugin):
            for part in parts.values():
                require_dense(part, type(self.plugin).__name__)
        given = {prefix: dict(part.named_parameters()) for prefix, part in parts.items()}
        names = [names_of(each) for each in models]
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        joint.require_known(optimizers, given)
        parallel = {
            prefix: self.plugin.configure(part)
            if prefix != joint.CRITERION
            else joint.replicate(part, self.plugin)
            for prefix, part in parts.items()
        }
        boosted = None
        if optimizers:
            unscaled = joint.names_of(orthogonalized(optimizers), given)
            joint.rebind(optimizers, given, parts, parallel)
            renamed = {prefix: made.renamed for prefix, made in parallel.items()}
            record = BoostedParameters(parts, renamed, self.plugin)
            boosted = self._wrap_optimizers(optimizers, parallel, unscaled, record)
        wrapped = []
        for each, named, made in zip(models, names, parallel.values(), strict=False):
            if made.pipeline is not None:
                made.pipeline.autocast(self.dtype)
            wrapper = ModelWrapper(made.module, each, self.dtype, made.pipeline)
            wrapper.renamed, wrapper.names, wrapper.optimizer = made.renamed, named, boosted
            wrappers[each] = ref(wrapper)
            wrapped.append(wrapper)
        if boosted is not None or any(map(_waits, parallel.values())):
            register(boosted, _owned([*wrapped, *parts.values()], given, boosted))
        first = wrapped[0] if isinstance(model, nn.Module) else wrapped
        return first, boosted, criterion, dataloader, lr_scheduler

    def _wrap_optimizers(
        self,
        optimizers: Sequence[Optimizer],
        parallel: Mapping[str, ParallelModel],
        unscaled: Collection[str],
        record: BoostedParameters,
    ) -> OptimizerWrapper:
        for optimizer in optimizers:
            require_safe(optimizer, parallel.values(), self.plugin)
        layout = Layout.union({prefix: made.layout for prefix, made in parallel.items()})
        layout.leave_unscaled(unscaled)
        return OptimizerWrapper(
            optimizers,
            layout,
            self.loss_scale,
            self.nonfinite,
            sync_grads=in_turn(*(made.sync_grads for made in parallel.values())),
            broadcast_params=in_turn(*(made.broadcast_params for made in parallel.values())),
            max_norm=self.plugin.max_norm,
            watch_final=_watch_final(parallel),
            skip=copy.deepcopy(self.skip),
            start_mean=partial(self.plugin.start_mean_over_data, device=layout.device),
            steps=_stepped(parallel),
            boosted=record,
        )

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Run the backward pass of ``loss``, scaled under fp16."""
        optimizer.backward(loss)

    @contextmanager
    def no_sync(
        self,
        model: ModelWrapper | Sequence[ModelWrapper],
        optimizer: OptimizerWrapper | None = None,
    ) -> Iterator[None]:
        """Return a context in which gradients accumulate without synchronisation.

        Run the forward and backward pass of each microbatch of a window but the last inside it.

        Args:
            model: the boosted model, or all models that were boosted together.
            optimizer: the boosted optimizer; by default the one that was boosted with the model. It
                refuses to clip gradients that are not yet final.
        """
        models = [model] if isinstance(model, ModelWrapper) else list(model)
        boosted = optimizer or models[0].optimizer
        with ExitStack() as stack:
            if boosted is not None:
                stack.enter_context(boosted.accumulate())
            for each in models:
                stack.enter_context(self.plugin.no_sync(each.module))
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
                microbatches, as :class:`runner.booster.loss.WindowLoss` counts them. The sum of a
                criterion with ``reduction="sum"`` is not divided.
            optimizer: the boosted optimizer; None for forward passes only.
            return_loss: whether to return the loss.
            return_outputs: whether to return outputs; in training this costs another forward pass.

        Returns:
            ``loss``, the mean over the batch, and ``outputs`` [B, ...] on the last stage. Both are
            None on other stages and if they were not asked for. The loss of a batch without
            samples is 0 and has gradients of 0, because other data-parallel ranks may wait for
            this one.

        Raises:
            runner.booster.batch.BatchError: the batch has no targets, or several inputs.
            RuntimeError: the model is not split into stages.
            StepOrderError: the gradients of this step were made final or clipped already.
        """
        pipeline = model.pipeline
        if pipeline is None:
            raise RuntimeError(
                "the model is in one piece: give PipelineParallelPlugin two ranks or more"
            )
        window_loss = self._loss_of(model, criterion)
        batch = next(data_iter)
        divisor = window_loss.divisor(window_loss.items(batch).items)
        inputs, targets = window_loss.call(batch).only_tensor(), targets_of(batch)
        if optimizer is not None:
            self.before_pipeline(model, window_loss, batch)
        loss: Tensor | None = None
        outputs: Tensor | None = None
        if optimizer is not None:
            factor = optimizer.begin_backward(1.0 / divisor)

            def summed(out: Tensor, at: slice) -> Tensor:
                part = mapped(batch, itemgetter(at))
                return window_loss.sum(out, part, window_loss.items(part).items) * factor

            total = pipeline.train(inputs, summed)
            optimizer.add_loss(total / (factor * divisor))
            optimizer.end_backward()
            loss = total / (factor * divisor) if pipeline.last else None
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

        Args:
            model: the boosted model.
            loss: sums the criterion.
            batch: the batch.

        Raises:
            ValueError: the loss of the batch is not that of its microbatches together; or see
                :meth:`BoostedParameters.require_same`.
        """
        if model.optimizer is not None and model.optimizer.boosted is not None:
            model.optimizer.boosted.require_same()
        if not loss.unproved or model.pipeline is None:
            return
        loss.unproved = False
        inputs = loss.call(batch).only_tensor()
        devices = [inputs.device] if inputs.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            outputs = model.pipeline.evaluate(inputs)
        wrong = outputs is not None and not loss.adds_up(outputs, batch)
        if any(on_any_rank([wrong], dist.group.WORLD)):
            raise ValueError(
                "the mean loss of a batch is not that of its samples, and a pipeline computes it "
                f"in microbatches: {loss.advice}"
            )

    def _loss_of(self, model: ModelWrapper, criterion: Any) -> WindowLoss:
        """Return the WindowLoss of ``criterion``, cached so that it warns only once."""
        known = self._window_loss
        if known is None or known[0] is not criterion:
            plugin = self.plugin
            checked = known is None and plugin.reports_metrics and plugin.data_rank == 0
            known = criterion, WindowLoss(model.unwrap(), criterion, checked=checked)
            self._window_loss = known
        return known[1]

    def state_dict(self, model: ModelWrapper) -> dict[str, Tensor]:
        """Gather the state dict of the whole model on the host; every rank has to call this.

        Returns:
            A state dict for the user's model on the first rank; an empty dict on the others.
        """
        return saved.whole_model(model)

    def load_state_dict(self, model: ModelWrapper, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the whole model; every rank has to call this.

        Optimizer state and averages of earlier weights do not change.

        Args:
            model: the boosted model.
            state: what :meth:`state_dict` returned, or the ``state_dict()`` of the user's model in
                one process. Only that of the first rank is read.

        Raises:
            ValueError: names or shapes are not those of the model; the message, the same on every
                rank, lists them. Nothing was loaded.
        """
        stages = [] if model.pipeline is None else list(model.pipeline.stages.values())
        reshard([model.unwrap(), *stages])
        load(model.unwrap(), model.renamed, model.names, state)


def _waits(made: ParallelModel) -> bool:
    """Return whether gradients are final only after a call of ``sync_grads``, unlike under DDP."""
    return made.sync_grads is not nothing and not isinstance(made.module, DistributedDataParallel)


def _stepped(parallel: Mapping[str, ParallelModel]) -> frozenset[int] | None:
    """Return the ids of the parameters that this rank steps; None for all."""
    if all(made.steps is None for made in parallel.values()):
        return None
    return frozenset(
        id(shard.param)
        for made in parallel.values()
        for shard in made.layout.shards
        if made.steps is None or id(shard.param) in made.steps
    )


def _watch_final(parallel: Mapping[str, ParallelModel]) -> Callable[[Final], None] | None:
    """Return what tells of final gradients of all models; None if that of one is not known.

    Those of a criterion are final after the backward pass.
    """
    calls = [made.watch_final for prefix, made in parallel.items() if prefix != joint.CRITERION]
    known = [call for call in calls if call is not None]
    if len(known) < len(calls):
        return None

    def watch(final: Final) -> None:
        for call in known:
            call(final)

    return watch


def _owned(
    modules: Sequence[nn.Module],
    given: Mapping[str, Mapping[str, nn.Parameter]],
    optimizer: OptimizerWrapper | None,
) -> Iterator[nn.Module | Tensor]:
    """List all modules and parameters that users may pass to a function that clips.

    These include the original parameters in ``given``, some of which the plugin replaced.
    """
    for module in modules:
        yield module
        yield from module.parameters()
        if isinstance(module, ModelWrapper):
            yield module.module
    for named in given.values():
        yield from named.values()
    if optimizer is not None:
        yield from (shard.param for shard in optimizer.layout.shards)
