"""The loss of a window: Σ item losses ÷ Σ items, over all its microbatches and ranks.

Items are what the criterion's mean divides by: samples, targets that are not ignored, or the sum of
their class weights. A mean of means would weigh a short microbatch, or one full of ignored targets,
like a full one; so a microbatch contributes its *sum*, and the items of the whole window divide it,
before the backward pass and therefore before clipping.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.data.dataset import IGNORED

log = logging.getLogger(__name__)

Criterion = Callable[[Any, Any], Tensor]

_SUMMABLE = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
_SUMMABLE_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference between a loss and that of its parts which rounding explains, by dtype."""
_ROUNDING_HALF = 2e-2


class BatchError(TypeError):
    """A batch is not of the form that the training loop reads."""


class Count(NamedTuple):
    """What one microbatch holds.

    Attributes:
        items: what the mean of the criterion divides by.
        samples: number of samples.
        tokens: targets that are not ignored, where targets are sequences; 0 where they are not.
    """

    items: float
    samples: int
    tokens: int


class WindowLoss:
    """Sums and counts what a criterion averages.

    Cross entropy and negative log-likelihood, modules or functions, with class weights, label
    smoothing or class probabilities, are summed exactly. Any other criterion returns a mean, which
    is multiplied with the items: the samples, or the class targets that are not ignored. A
    criterion (or a model with a ``loss``) whose mean divides by something else has a method
    ``loss_items(targets)`` (a model: ``loss_items(batch)``) that returns this divisor.

    A criterion with ``reduction="sum"`` is not divided by anything: a step takes the gradient of
    the sum over its whole batch, as plain PyTorch does.

    Args:
        model: the user's model. One with a method ``loss(outputs, batch)`` is called with the whole
            batch and needs no criterion.
        criterion: loss of (outputs, targets); mean cross entropy over the last dimension of the
            outputs by default.
        checked: whether to warn, once, about a criterion whose value for a batch is not the
            mean over the items of its parts.

    Raises:
        ValueError: the criterion does not reduce its losses to one number.
    """

    def __init__(
        self, model: nn.Module, criterion: Criterion | None = None, checked: bool = False
    ) -> None:
        own = getattr(model, "loss", None)
        self.takes_batch = criterion is None and inspect.ismethod(own)
        self.ignored: int = _option(criterion, "ignore_index", IGNORED)
        reduction = _option(criterion, "reduction", "mean")
        if reduction == "none":
            raise ValueError(
                "the criterion has reduction='none' and returns a loss for each item: use "
                "reduction='mean', or 'sum' for steps that are not divided by the batch"
            )
        self.averages = reduction != "sum"
        self.checked = checked and self.averages
        self._classes = False
        self._class_dim = 1
        self._weight = _HostCopy(None)
        self._divisor: Callable[[Any], Any] | None = None
        self._sums = not self.averages
        if self.takes_batch:
            assert callable(own)
            self._criterion: Criterion = own
            self._divisor = getattr(model, "loss_items", None)
            self._holder: nn.Module | None = model
        elif criterion is None:
            self._criterion, self._sums, self._classes = _cross_entropy_sum, True, True
            self._class_dim = -1
        else:
            self._divisor = getattr(criterion, "loss_items", None)
            self._holder = criterion if isinstance(criterion, nn.Module) else None
            self._criterion = criterion
            if (summed := _summed(criterion)) is not None:
                self._criterion, self._sums, self._classes = summed, True, True
                self._weight = _HostCopy(_option(criterion, "weight", None))
        if self._sums:
            self.checked = False

    def items(self, batch: Any) -> Count:
        """Count the items, samples and tokens of a microbatch.

        Raises:
            BatchError: the batch is not a pair (inputs, targets) and the model has no ``loss``.
        """
        targets = targets_of(batch)
        if targets is None:
            if not self.takes_batch:
                raise BatchError(_not_a_pair(batch))
            samples = _samples(batch)
            return Count(self._divided_by(batch, samples), samples, 0)
        graded = self.graded(batch)
        items: float = graded
        if targets.is_floating_point():
            items = len(targets)
            if self._classes and targets.ndim:  # Class probabilities: one item for each vector.
                dim = min(self._class_dim, targets.ndim - 1)
                items = targets.numel() // targets.shape[dim]
        elif (weight := self._weight.on(targets.device)) is not None:
            counted = targets[targets != self.ignored]
            items = float(weight[counted].sum(dtype=torch.float64))
        items = self._divided_by(batch if self.takes_batch else targets, items)
        return Count(items, len(targets), graded if targets.ndim > 1 else 0)

    def graded(self, batch: Any) -> int:
        """Count the class targets of a microbatch that are not ignored; 0 for other targets."""
        targets = targets_of(batch)
        if targets is None or targets.is_floating_point():
            return 0
        if targets.device.type == "cpu":
            return int(np.count_nonzero(targets.numpy() != self.ignored))
        return int((targets != self.ignored).sum())

    def divisor(self, items: float) -> float:
        """Return what the summed loss of a window with ``items`` is divided by."""
        return (items or 1.0) if self.averages else 1.0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's outputs: logits where it returns a structure that has them."""
        outputs = model(batch) if self.takes_batch else model(batch[0])
        return getattr(outputs, "logits", outputs)

    def sum(self, outputs: Any, batch: Any, items: float | None) -> Tensor:
        """Sum the item losses of a microbatch.

        Args:
            outputs: of the model.
            batch: what they were computed from.
            items: the microbatch's own; None for a batch that does not count. Its sum is 0 and has
                a gradient.
        """
        if items is None or (items == 0 and not self._sums):
            return _zero(outputs)
        wanted = batch if self.takes_batch else batch[1]
        loss = self._criterion(outputs, wanted)
        if self._sums:
            return loss
        if self.checked:
            self.checked = False
            self._check(outputs, batch, loss.detach(), items)
        return loss * items

    def correct(self, outputs: Any, batch: Any) -> int | None:
        """Items whose largest logit is the target's; None where that has no meaning."""
        targets = targets_of(batch)
        if targets is None or not isinstance(outputs, Tensor) or targets.is_floating_point():
            return None
        if outputs.shape[:-1] != targets.shape:
            return None
        right = (outputs.argmax(-1) == targets) & (targets != self.ignored)
        return int(right.sum())

    def _divided_by(self, counted: Any, items: float) -> float:
        return items if self._divisor is None else float(self._divisor(counted))

    def _check(self, outputs: Any, batch: Any, loss: Tensor, items: float) -> None:
        """Warn if the sum of a batch's losses is not that of its first sample and the rest.

        The criterion is called twice more, on this rank alone: so a copy of it is called, whose
        buffers and attributes are its own, and one that communicates is not looked at.

        Args:
            outputs: of the model.
            batch: on the device.
            loss: of the batch; read only where there is something to compare it with.
            items: of the batch.
        """
        samples = _samples(batch)
        if samples < 2 or not isinstance(outputs, Tensor) or len(outputs) != samples:
            return
        held = [] if self._holder is None else list(self._holder.parameters())
        if any(isinstance(each, DTensor) for each in [outputs, *held]):
            return  # Its loss may wait for other ranks.
        total, on = 0.0, [outputs.device] if outputs.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(on), _Alone():  # type: ignore[no-untyped-call]
                # Parameters are shared: no loss writes to them, and they may be large.
                criterion = copy.deepcopy(self._criterion, {id(each): each for each in held})
                for at in (slice(1), slice(1, None)):
                    part = tree_map_only(Tensor, itemgetter(at), batch)
                    if _samples(part) == samples:
                        return  # Of a structure that is not taken apart.
                    here = self.items(part).items
                    wanted = part if self.takes_batch else part[1]
                    if here:
                        total += float(criterion(outputs[at], wanted)) * here
        except Exception:
            return  # It cannot be taken apart to look.
        whole = float(loss) * items
        rounding = _ROUNDING.get(outputs.dtype, _ROUNDING_HALF)
        if math.isfinite(whole) and not abs(total - whole) <= rounding * abs(whole):
            log.warning(
                "the loss of a batch is not the mean over the items of its parts: a step depends on"
                " how its batch is divided into microbatches and over ranks. %s. Where samples "
                "depend on each other (a contrastive loss, say), this cannot be avoided",
                "Give the model a method loss_items(batch) that returns what the mean divides by"
                if self.takes_batch
                else "Give the criterion a method loss_items(targets) that returns what its mean "
                "divides by, or use torch.nn.CrossEntropyLoss, whose divisor is known",
            )


def targets_of(batch: Any) -> Tensor | None:
    """Return the targets of a pair (inputs, targets); None of anything else."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1] if batch[1].ndim else None
    return None


def _not_a_pair(batch: Any) -> str:
    match batch:
        case Mapping():
            keys = ", ".join(map(repr, list(batch)[:5])) + (", ..." if len(batch) > 5 else "")
            what = f"a {type(batch).__name__} with the keys {keys}"
        case tuple() | list() if len(batch) != 2:
            what = f"a {type(batch).__name__} of {len(batch)}"
        case tuple() | list():
            what = f"a pair whose targets are a {type(batch[1]).__name__}"
            if isinstance(batch[1], Tensor):
                what = "a pair whose targets are a tensor without dimensions"
        case _ if is_dataclass(batch):
            what = f"a dataclass {type(batch).__name__}"
        case _:
            what = f"a {type(batch).__name__}"
    return (
        f"a batch has to be a pair (inputs, targets) whose targets are a tensor [samples, ...], not"
        f" {what}: give the DataLoader a collate_fn that returns such a pair, or give the model a "
        "method loss(outputs, batch); forward and loss then get the whole batch"
    )


def _samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch of any structure.

    Raises:
        BatchError: there is none.
    """
    structure = batch
    if isinstance(batch, Mapping):
        structure = dict(batch)  # Also one that PyTorch's trees do not know.
    elif is_dataclass(batch):
        structure = vars(batch)
    for leaf in tree_leaves(structure):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise BatchError(
        f"a batch has to hold a tensor [samples, ...]: there is none in this "
        f"{type(batch).__name__}; let the DataLoader's collate_fn make one"
    )


def _option(criterion: Any, name: str, default: Any) -> Any:
    """Return an attribute of a criterion, or a keyword that a ``functools.partial`` has set."""
    keywords = getattr(criterion, "keywords", None) or {}
    return keywords.get(name, getattr(criterion, name, default))


def _summed(criterion: Criterion) -> Criterion | None:
    """Return the same criterion with a sum for its mean; None where that is not known to exist."""
    if isinstance(criterion, nn.Module) and type(criterion).forward in _SUMMABLE:
        summed: Any = copy.copy(criterion)
        summed.reduction = "sum"
        return cast(Criterion, summed)
    if isinstance(criterion, partial) and not criterion.args:
        if criterion.func in _SUMMABLE_FUNCTIONS:
            return partial(criterion, reduction="sum")
    elif criterion in _SUMMABLE_FUNCTIONS:
        return partial(criterion, reduction="sum")
    return None


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse collectives: no other rank would take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} waits for other ranks")
        return func(*args, **(kwargs or {}))


class _HostCopy:
    """A tensor, and its copy on the host: made anew only when the tensor was written to."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor = tensor
        self._made: tuple[int, Tensor] | None = None

    def on(self, device: torch.device) -> Tensor | None:
        """Return the tensor on ``device``."""
        tensor = self._tensor
        if tensor is None or tensor.device == device:
            return tensor
        if self._made is None or self._made[0] != tensor._version:
            self._made = (tensor._version, tensor.to(device))
        return self._made[1]


def _zero(outputs: Any) -> Tensor:
    """Return 0 with a gradient of zeros to each tensor of ``outputs``."""
    total = sum(
        leaf.sum() * 0.0
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )
    assert isinstance(total, Tensor), "the model returned no tensor"
    return total


def _cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross entropy of logits ``(..., classes)``.

    Args:
        outputs: logits ``(..., classes)``.
        targets: classes ``(...)``, or class probabilities ``(..., classes)``.
    """
    flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    return functional.cross_entropy(
        outputs.flatten(0, -2), flat, ignore_index=IGNORED, reduction="sum"
    )
