"""The Booster: ties model, optimizer, criterion, dataloader and scheduler to a plugin."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.booster import joint
from runner.booster.loss import WindowLoss
from runner.booster.optimizer import Nonfinite, OptimizerWrapper, nothing
from runner.booster.optimizers import require_safe
from runner.booster.plugin import Plugin, SinglePlugin, TorchDDPPlugin
from runner.booster.precision import LossScale, ModelWrapper, dtype_of
from runner.booster.prepare import compiled_in_place, require_dense
from runner.clip import Layout
from runner.clip.boosted import register
from runner.parallel.full_state_dict import gathered, load
from runner.parallel.sharding import reshard

_wrappers: WeakKeyDictionary[nn.Module, ReferenceType[ModelWrapper]] = WeakKeyDictionary()
"""The wrapper of each user's model that was boosted."""


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
        self._window_loss: tuple[Any, WindowLoss] | None = None

    def boost(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Spread the model over the ranks and wrap the optimizer.

        Args:
            model: the model, or several models that one optimizer step trains together: their
                gradients have one norm.
            optimizer: the optimizer, or several that step together, each over its own parameters
                (:class:`torch.optim.Muon` for matrices and AdamW for the rest, say).
            criterion: the loss function. The trainable parameters of a module (a learned
                temperature) are synchronised, counted and clipped with those of the model.
            dataloader: returned as it is.
            lr_scheduler: returned as it is.

        Returns:
            What was given, in the same order: the model as :class:`ModelWrapper` (several as a
            list), the optimizers as one :class:`~runner.booster.optimizer.OptimizerWrapper`, the
            rest as it was.

        Raises:
            ValueError: a model was boosted before, models share a parameter, or an optimizer holds
                a parameter of none of these modules, or has stepped already.
        """
        listed = [model] if isinstance(model, nn.Module) else list(model)
        models = [compiled_in_place(each) for each in listed]
        _require_new(models, leaves_models=isinstance(self.plugin, SinglePlugin))
        parts = joint.named(models, criterion)
        if not isinstance(self.plugin, SinglePlugin | TorchDDPPlugin):
            for part in parts.values():
                require_dense(part, type(self.plugin).__name__)
        given = {prefix: dict(part.named_parameters()) for prefix, part in parts.items()}
        names = [_names_of(each) for each in models]
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        joint.require_known(optimizers, given)
        spreads = {
            prefix: self.plugin.configure(part)
            if prefix != joint.CRITERION
            else joint.replicate(part, self.plugin)
            for prefix, part in parts.items()
        }
        boosted = None
        if optimizers:
            joint.rebind(optimizers, given, parts, spreads)
            for stepped in optimizers:
                require_safe(stepped, spreads.values(), self.plugin)
            boosted = OptimizerWrapper(
                optimizers,
                Layout.union({prefix: spread.layout for prefix, spread in spreads.items()}),
                self.loss_scale,
                self.nonfinite,
                sync_grads=joint.in_turn([spread.sync_grads for spread in spreads.values()]),
                broadcast_params=joint.in_turn(
                    [spread.broadcast_params for spread in spreads.values()]
                ),
                max_norm=self.plugin.max_norm,
            )
        wrapped = []
        for each, named, spread in zip(models, names, spreads.values(), strict=False):
            if spread.pipeline is not None:
                spread.pipeline.autocast(self.dtype)
            wrapper = ModelWrapper(spread.module, each, self.dtype, spread.pipeline)
            wrapper.renamed, wrapper.names, wrapper.optimizer = spread.renamed, named, boosted
            _wrappers[each] = ref(wrapper)
            wrapped.append(wrapper)
        if boosted is not None or any(
            spread.sync_grads is not nothing for spread in spreads.values()
        ):
            register(boosted, _owned([*wrapped, *parts.values()], given, boosted))
        first = wrapped[0] if isinstance(model, nn.Module) else wrapped
        return first, boosted, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Backward pass of ``loss``, scaled under fp16."""
        optimizer.backward(loss)

    def no_sync(
        self,
        model: ModelWrapper | Sequence[ModelWrapper],
        optimizer: OptimizerWrapper | None = None,
    ) -> AbstractContextManager[None]:
        """Context of every microbatch of a window but its last: forward and backward inside.

        Args:
            model: the boosted model, or all models that were boosted together.
            optimizer: the boosted optimizer; by default the one that was boosted with the model. It
                refuses to clip gradients that are not yet final.
        """
        models = [model] if isinstance(model, ModelWrapper) else list(model)
        held = [self.plugin.no_sync(each.module) for each in models]
        return _accumulating(held, optimizer or models[0].optimizer)

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
            criterion: loss of (outputs, targets). The mean is taken over the items of all
                microbatches, as :class:`runner.booster.loss.WindowLoss` counts them; with
                ``reduction="sum"`` nothing divides it.
            optimizer: the boosted optimizer. None: forward passes alone.
            return_loss: whether the loss is wanted.
            return_outputs: whether outputs are wanted; a further forward pass when training.

        Returns:
            ``loss``, the mean over the batch, and ``outputs`` [B, ...]: on the last stage, None on
            the others and where they are not wanted. The loss of a batch without samples is 0, and
            so are its gradients: other data-parallel ranks may wait for this one.

        Raises:
            runner.booster.loss.BatchError: the batch is not a pair (inputs, targets).
            RuntimeError: the model is not cut into stages.
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
        inputs, targets = batch
        loss: Tensor | None = None
        outputs: Tensor | None = None
        if optimizer is not None:
            factor = optimizer.begin_backward(1.0 / divisor)

            def summed(out: Tensor, at: slice) -> Tensor:
                part = (inputs, targets[at])
                return window_loss.sum(out, part, window_loss.items(part).items) * factor

            total = pipeline.train(inputs, summed)
            optimizer.end_backward()
            loss = total / (factor * divisor) if pipeline.last else None
        if optimizer is None or return_outputs:
            outputs = pipeline.evaluate(inputs)
            if optimizer is None and outputs is not None:
                loss = criterion(outputs, targets) if len(targets) else outputs.sum() * 0.0
        return {
            "loss": loss if return_loss else None,
            "outputs": outputs if return_outputs else None,
        }

    def _loss_of(self, model: ModelWrapper, criterion: Any) -> WindowLoss:
        """Return what sums ``criterion``; kept, so that a warning about it comes once."""
        plugin = self.plugin
        checked = self._window_loss is None and plugin.reports_metrics and plugin.data_rank == 0
        if self._window_loss is None or self._window_loss[0] is not criterion:
            self._window_loss = (
                criterion,
                WindowLoss(model.unwrap(), criterion, checked=checked),
            )
        return self._window_loss[1]

    def state_dict(self, model: ModelWrapper) -> dict[str, Tensor]:
        """The state dict of the whole model, on the host; every rank has to call it.

        Returns:
            What the user's model takes by ``load_state_dict``, on the first rank; nothing on the
            others.
        """
        whole = gathered(model.unwrap(), model.renamed)
        return {name: whole[first] for name, first in model.names.items()} if whole else {}

    def load_state_dict(self, model: ModelWrapper, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the whole model; every rank has to call it.

        The state of an optimizer, and an average of earlier weights, are left as they are.

        Args:
            model: the boosted model.
            state: what :meth:`state_dict` returned, or the ``state_dict()`` of the user's model in
                one process. Read on the first rank; what other ranks give is ignored.

        Raises:
            ValueError: names or shapes are not those of the model; the message, the same on every
                rank, lists them. Nothing was loaded.
        """
        stages = [] if model.pipeline is None else list(model.pipeline.stages.values())
        reshard([model.unwrap(), *stages])
        load(model.unwrap(), model.renamed, model.names, state)


def _names_of(model: nn.Module) -> dict[str, str]:
    """All names in the state dict of ``model``; for each the first one of the same tensor."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: first.setdefault(id(t), name) for name, t in named if isinstance(t, Tensor)}


def _owned(
    modules: Sequence[nn.Module],
    given: Mapping[str, Mapping[str, nn.Parameter]],
    optimizer: OptimizerWrapper | None,
) -> Iterator[nn.Module | Tensor]:
    """Everything by which users may name the gradients of what was boosted together.

    Args:
        modules: the wrappers and the user's modules.
        given: the parameters of each module before it was spread: some were replaced.
        optimizer: the boosted optimizer, if any; its layout holds the parameters there are now.
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


def wrapper_of(model: nn.Module) -> ModelWrapper | None:
    """The wrapper of a boosted model; None if ``model`` was not boosted, or the wrapper is gone.

    Args:
        model: the wrapper itself, or the user's model.
    """
    if isinstance(model, ModelWrapper):
        return model
    known = _wrappers.get(model)
    return None if known is None else known()


def _require_new(models: Sequence[nn.Module], *, leaves_models: bool) -> None:
    """Refuse to boost a model twice.

    Args:
        models: the models to boost.
        leaves_models: whether the plugin leaves models as they are, so that one can be boosted
            again when its former wrapper is gone.

    Raises:
        ValueError: one was boosted before.
    """
    if leaves_models and any(model in _wrappers for model in models):
        gc.collect()  # A Trainer and its wrapper refer to each other.
    for model in models:
        again = isinstance(model, ModelWrapper) or (
            model in _wrappers and not (leaves_models and wrapper_of(model) is None)
        )
        if again:
            raise ValueError(
                f"this {type(model).__name__} is boosted already: boost a model once, with all its "
                "optimizers: booster.boost(model, [first, second], ...); to start anew, build the "
                "model anew"
            )


@contextmanager
def _accumulating(
    held: Sequence[AbstractContextManager[Any]], optimizer: OptimizerWrapper | None
) -> Iterator[None]:
    with ExitStack() as stack:
        if optimizer is not None:
            stack.enter_context(optimizer.accumulate())
        for each in held:
            stack.enter_context(each)
        yield
