"""What forward passes of a batch, and of parts of it, show of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from runner.booster.batch import batch_size, mapped
from runner.booster.broadcast import BroadcastError
from runner.booster.candidates import is_silent, of_samples_in
from runner.booster.graph_places import GraphError, Recorded, shapes_in
from runner.booster.loss import DivisorError, WindowLoss
from runner.booster.loss_graph import terms_of
from runner.booster.outputs import (
    as_leaf,
    holds_numbers,
    logits_of,
    returned_loss,
    with_scalar_loss,
)
from runner.booster.parts import has_samples, samples_at
from runner.booster.terms import Term
from runner.booster.untouched import Trace, untouched
from runner.gradients.transfer import start_gather
from runner.parallel.collectives import from_all
from runner.parallel.hooks import held_tensors
from runner.parallel.pipeline import Pipeline

_LARGEST_VECTOR = 1 << 18  # classes
WHILE_MEASURED = (
    "raised while it was measured what the loss divides by (loss.items=samples, labels or none "
    "states it)"
)


class Shown(NamedTuple):
    """What a forward pass has shown of the loss of a batch, or of a part of it.

    ``numbers`` are those that the samples of a part have in the batch. ``vectors`` are constant
    vectors of numbers that the loss has taken, which may be weights of classes. ``shapes`` are
    those of the tensors that the loss was computed of.
    """

    batch: Any
    loss: Tensor
    terms: Sequence[Term] = ()
    error: GraphError | None = None
    numbers: Sequence[int] = ()
    vectors: Sequence[Tensor] = ()
    shapes: Sequence[tuple[int, ...]] = ()

    @property
    def value(self) -> float:
        return float(self.loss)

    @property
    def tells_nothing(self) -> bool:
        """Whether it is infinite, is multiplied by NaN, or is 0 and divides by nothing."""
        is_finite = all(math.isfinite(term.factor) for term in self.terms)
        is_finite = is_finite and not math.isinf(self.value)
        return not is_finite or is_silent(self.loss, self.terms)

    @property
    def is_without_samples(self) -> bool:
        """Whether nothing but penalties of parameters has a gradient, as without labels."""
        return bool(self.terms) and all(term.is_nothing for term in of_samples_in(self.terms))

    @property
    def divides_by_none(self) -> bool:
        """Whether it is a mean over nothing, such as over pairs of one sample."""
        return any(not term.divisor for term in self.terms)

    @property
    def divisors(self) -> str:
        """What the parts of the loss divide by, for a message."""
        terms = [term for term in self.terms if term.factor] or self.terms
        numbers = dict.fromkeys(f"{term.divisor:.10g}" for term in terms)
        listed = ", ".join(list(numbers)[:4])
        return f"({listed})" if len(numbers) > 1 else listed


class ShowsNothing(NamedTuple):
    """Why a forward pass has shown nothing: a refusal, what a warning says, or neither."""

    problem: str = ""
    reason: str = ""


@dataclass
class MeasuredModel:
    """A model and its loss, run on batches of this rank.

    ``is_inside`` is true in a forward pass in which other ranks may wait for this one. An exception
    there ends the run: the ranks would not meet again.
    ``trains_first``: a batch is measured in training mode first, as parts of a loss may exist there
    alone.
    """

    module: nn.Module
    pipeline: Pipeline | None
    loss: WindowLoss
    together: bool
    training: bool = False
    trains_first: bool = False
    is_inside: bool = False

    def communicates(self) -> bool:
        """Return whether ranks exchange tensors in a forward pass."""
        if self.pipeline is not None:
            return True
        for module in self.module.modules() if self.together else ():
            values = (*vars(module).values(), *module._parameters.values())
            if isinstance(module, FSDPModule):
                return True
            if any(isinstance(value, dist.ProcessGroup | DTensor) for value in values):
                return True
        return False

    def from_ranks(self, value: Any) -> list[Any]:
        return from_all(value) if self.together else [value]

    def gather(self, row: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank; a collective."""
        if not self.together:
            return [list(row)]
        rows: list[list[float]] = start_gather(
            torch.tensor(row, dtype=torch.float64), None
        )().tolist()
        return rows

    def modules(self) -> Iterator[nn.Module]:
        yield from self.module.modules()
        stages = () if self.pipeline is None else self.pipeline.stages.values()
        for stage in stages:
            yield from stage.modules()

    def outputs(self, batch: Any) -> Any:
        for module in self.modules():
            module.training = self.training
        call = self.loss.call(batch)
        self.is_inside = self.communicates()
        if self.pipeline is not None:
            outputs = self.pipeline.evaluate(call.only_tensor())
        else:
            args, kwargs = call
            outputs = self.module(*args, **kwargs)
        self.is_inside = False
        return outputs

    def without_a_trace(self, batch: Any) -> AbstractContextManager[Trace]:
        device = next((tensor.device for tensor in held_tensors(batch)), torch.device("cpu"))
        criterion = self.loss.criterion
        of_criterion = criterion.modules() if isinstance(criterion, nn.Module) else ()
        return untouched(chain(self.modules(), of_criterion), device)


LossOf = Callable[[Sequence[int] | None], Tensor | None]


def first_pass(
    model: MeasuredModel, batch: Any, trace: Trace
) -> tuple[Shown | ShowsNothing, LossOf]:
    """Return what a batch shows, or why it shows nothing, and what computes losses of parts."""
    nothing = ShowsNothing()
    is_exact = False
    loss_of: LossOf = lambda numbers: None  # noqa: E731
    for training in (model.trains_first, not model.trains_first):
        model.training = training
        trace.remove()
        try:
            loss_of = (_returned if model.loss.may_return else _compared)(model, batch)
            trace.drawn()  # by the forward pass of a model whose outputs are compared
            shown = shown_by(batch, loss_of)
        except _ExactError:
            is_exact = True  # the cross entropy of logits is, unless training returns a loss
            continue
        except (BroadcastError, DivisorError) as error:
            return ShowsNothing(problem=str(error)), loss_of
        except Exception as error:
            if model.is_inside:
                error.add_note(WHILE_MEASURED)
                raise
            reason = f"its model does not take the batch alone ({type(error).__name__})"
            nothing = nothing if is_exact else ShowsNothing(reason=reason)
            if model.pipeline is not None:
                break
            continue
        if shown is not None:
            return shown, loss_of
        if model.pipeline is not None:
            break  # the last stage, on another rank, has the outputs
    return nothing, loss_of


class _ExactError(Exception):
    """The model returns logits, and no loss."""


def _returned(model: MeasuredModel, batch: Any) -> LossOf:
    """Return a function that computes the loss that a model returns."""
    samples = batch_size(batch)

    def loss_of(numbers: Sequence[int] | None) -> Tensor | None:
        part = batch if numbers is None else samples_at(batch, numbers, samples)
        outputs = with_scalar_loss(model.outputs(part))
        loss = returned_loss(outputs)
        if loss is None and isinstance(logits_of(outputs), Tensor):
            raise _ExactError
        return loss

    return loss_of


def _compared(model: MeasuredModel, batch: Any) -> LossOf:
    """Return a function that computes a loss of outputs, which are computed once.

    They are computed for each part if some are numbers, as these may be means over a batch.
    """
    samples = batch_size(batch)
    outputs = model.outputs(batch)
    numbers_too = holds_numbers(outputs)
    if not numbers_too:
        outputs = mapped(outputs, _without_graph)

    def loss_of(numbers: Sequence[int] | None) -> Tensor | None:
        if outputs is None:
            return None
        part = batch if numbers is None else samples_at(batch, numbers, samples)
        if numbers_too:
            return model.loss.mean(outputs if numbers is None else model.outputs(part), part)
        if numbers is not None and not has_samples(outputs, samples):
            raise ValueError("outputs have no dimension of samples")
        chosen = outputs if numbers is None else samples_at(outputs, numbers, samples)
        return model.loss.mean(mapped(chosen, _as_single_leaf), mapped(part, _as_single))

    return loss_of


def _as_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _as_single_leaf(tensor: Tensor) -> Tensor:
    return as_leaf(_as_single(tensor))


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach()


class _Numbers(TorchFunctionMode):
    """Keeps the numbers that are computed, such as the means that a loss adds up.

    Constant vectors that operations take, such as weights of classes, are kept too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_nodes: dict[tuple[Any, int], Tensor] = {}
        self.vectors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.vectors += [argument.clone() for argument in args if _is_vector(argument)]
        returned = func(*args, **(kwargs or {}))
        for result in returned if type(returned) is tuple else (returned,):
            if type(result) is Tensor and result.numel() == 1 and result.grad_fn is not None:
                self.of_nodes[result.grad_fn, result.output_nr] = result.detach()
        return returned


def _is_vector(value: Any) -> bool:
    """Return whether a value is a constant vector of numbers, whose memory is not freed."""
    if type(value) is not Tensor or value.ndim != 1 or not 1 < len(value) <= _LARGEST_VECTOR:
        return False
    is_there = value.untyped_storage().nbytes() >= value.nbytes
    return is_there and value.is_floating_point() and not value.requires_grad


def shown_by(batch: Any, loss_of: LossOf, numbers: Sequence[int] | None = None) -> Shown | None:
    """Return what the loss of a batch, or of some samples of it, shows; None without a loss.

    Args:
        batch: the samples.
        loss_of: computes the loss.
        numbers: which samples of the whole batch these are.
    """
    with _Numbers() as computed:
        loss = loss_of(numbers)
    if loss is None:
        return None
    try:
        terms = terms_of(loss, Recorded(computed.of_nodes))
    except GraphError as error:
        return Shown(batch, loss.detach(), error=error, numbers=numbers or ())
    shapes = shapes_in(loss)
    return Shown(batch, loss.detach(), terms, None, numbers or (), computed.vectors, shapes=shapes)
