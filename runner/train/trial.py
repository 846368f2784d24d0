"""Two samples of the data through model, criterion and metrics, on torch's meta device."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.booster.batch import BatchError, mapped, targets_of
from runner.booster.broadcast import BroadcastError
from runner.booster.comparison import shape_of
from runner.booster.criterion import is_of_torch
from runner.booster.loss import DivisorError, Loss, WindowLoss
from runner.booster.outputs import logits_of, returned_loss
from runner.config.notation import first_line, in_one_line
from runner.config.problem import Problem
from runner.config.schema import RunConfig
from runner.data import Data, DataUnavailable
from runner.data.dataset import UnequalSamples, first_samples, length_of, targets_in_memory
from runner.train import build
from runner.train.maker import TargetError
from runner.train.metrics import EvalMetrics, MetricError
from runner.train.model import is_about_meta

_SIZES_OF_INPUTS = (
    *("in_features", "input_size", "input_dim", "in_dim", "d_in", "n_inputs", "num_inputs"),
    *("n_features", "num_features", "inputs", "features"),
)
"""Names that the size of its inputs has among the arguments of a model."""


def misfits_of_samples(
    config: RunConfig, model: nn.Module, data: Data, criterion: Any
) -> Iterator[Problem]:
    """Check that two samples go through model and criterion, and that metrics take the outputs."""
    if length_of(data.train) == 0:
        return
    try:
        loss = WindowLoss(model, Loss(criterion, config.loss.items))
    except ValueError as error:  # its reduction
        if config.loss.items != "auto":
            yield Problem("loss.items", config.loss.items, str(error))
        else:
            yield Problem("loss._target_", config.loss.target, str(error))
        return
    trial = _Trial(config, model, loss)
    try:
        trial.run(data, criterion)
    except BatchError as error:
        yield _misfit_of_batch(config, str(error))
    except DataUnavailable as error:
        yield Problem("data._target_", config.data.target, str(error))
    except MetricError as error:
        yield Problem("eval.metrics", error.metric, str(error))
    except TargetError as error:
        yield Problem(*trial.at_fault, str(error))
    except Exception as error:
        if not is_about_meta(error):
            yield Problem(*trial.at_fault, trial.refusal(error))


def _misfit_of_batch(config: RunConfig, message: str) -> Problem:
    """Return the problem of a batch that cannot be read; at ``data.columns``, if that is a key."""
    arguments = config.data.arguments
    if "columns" not in arguments or arguments["columns"] is not None:
        return Problem("data._target_", config.data.target, message)
    form, _, _ = message.partition(": give the DataLoader")
    return Problem(
        "data.columns", None, f"{form}: [[x,y],label] chooses columns of inputs and, last, targets"
    )


class _Trial:
    """Two samples on torch's meta device, which takes no memory.

    Attributes:
        at_fault: key and value of the target that an exception comes from.
    """

    def __init__(self, config: RunConfig, model: nn.Module, loss: WindowLoss) -> None:
        self._config = config
        self._model = model
        self._loss = loss
        self._samples: Any = None
        self.at_fault: tuple[str, str | None] = ("model._target_", config.model.target)

    def run(self, data: Data, criterion: Any) -> None:
        """Run model, criterion and metrics on the first two samples."""
        loss = self._loss
        self._samples = self._read(data)
        loss.items(self._samples)
        batch = mapped(self._samples, lambda t: t.to("meta"))
        if isinstance(criterion, nn.Module):
            criterion.to("meta")
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = loss.forward(self._model, batch)
            if not loss.takes_batch and returned_loss(outputs) is None:
                self.at_fault = ("loss._target_", self._config.loss.target)
                if criterion is None and _are_numbers(targets_of(self._samples)):
                    raise TargetError(
                        "must name a criterion, such as torch.nn.MSELoss: the targets are numbers, "
                        "not classes"
                    )
            unequal = loss.compares.unequal(outputs, batch)
            if unequal:
                raise TargetError(self._broadcast(unequal))
            total = self._total(outputs, batch)
        self._require_classes(data, outputs)
        self._require_loss(total, outputs, caught)
        if self._config.eval.metrics:
            EvalMetrics(self._config.eval.metrics, loss).try_on(logits_of(outputs), self._samples)

    def _total(self, outputs: Any, batch: Any) -> Any:
        """Return the loss of the batch; refuse one that is no number, or compares all with all."""
        try:
            return self._loss.sum(outputs, batch, items=1)
        except BroadcastError as error:
            raise TargetError(f"{error}{self._how_to_get_numbers()}") from error
        except DivisorError as error:
            raise TargetError(str(error)) from error

    def _require_classes(self, data: Data, outputs: Any) -> None:
        """Refuse targets that are no classes of the outputs, of all samples that are in memory."""
        classes = self._loss.compares.classes(outputs, self._samples)
        if classes is None:
            return
        seen = [targets_of(self._samples)]
        if self._config.data.collate.target is None:  # which may change targets
            seen += [targets_in_memory(dataset) for dataset in (data.train, data.test)]
        for targets in seen:
            if targets is None or not targets.numel():
                continue
            counted = targets[targets != self._loss.ignored]
            wrong = counted[(counted < 0) | (counted >= classes)]
            if not wrong.numel():
                continue
            self.at_fault = ("model._target_", self._config.model.target)
            if int(wrong.max()) >= classes:
                count = f"{classes} class{'' if classes == 1 else 'es'}"
                raise TargetError(f"gives {count}, and targets go to {int(wrong.max())}")
            text = f"a target is {int(wrong.min())}, and cross entropy ignores"
            raise TargetError(f"{text} {self._loss.ignored} alone")

    def _require_loss(self, loss: Any, outputs: Any, caught: Sequence[Any]) -> None:
        """Refuse a loss that is no number, compares other shapes, or does not take the targets."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"has the shape {shape_of(loss)}" if isinstance(loss, Tensor) else "is no tensor"
            raise TargetError(f"the loss of a batch must be one number, and {kind}")
        targets = targets_of(self._samples)
        if targets is not None and _were_broadcast(caught):
            shapes = f"outputs {shape_of(logits_of(outputs))} with targets {shape_of(targets)}"
            raise TargetError(self._broadcast(f"{shapes}, which would be broadcast"))
        criterion = self._loss.criterion
        on_meta = isinstance(criterion, nn.Module) and len(criterion.state_dict()) > 0
        if not is_of_torch(criterion) or on_meta or returned_loss(outputs) is not None:
            return
        with torch.enable_grad(), warnings.catch_warnings(action="ignore"):
            loss = self._loss.mean(tree_map_only(Tensor, _made_up, outputs), self._samples)
            torch.autograd.backward(loss)

    def _broadcast(self, shapes: str) -> str:
        return f"compares {shapes}: give both the same shape{self._how_to_get_numbers()}"

    def _how_to_get_numbers(self) -> str:
        """Return advice where whole numbers of a table are classes, and may be meant as numbers."""
        targets = targets_of(self._samples)
        is_table = self._config.data.target == "runner.data.table.table"
        if not is_table or targets is None or targets.is_floating_point():
            return ""
        return "; data.classes=false makes numbers of the whole numbers in a table"

    def _read(self, data: Data) -> Any:
        """Return a batch of the first two samples."""
        try:
            samples = first_samples(data.train)
        except DataUnavailable:
            raise
        except Exception as error:
            text = f"its first two samples cannot be read: {in_one_line(error)}"
            raise DataUnavailable(text) from error
        section = self._config.data
        if section.collate.target is not None:
            self.at_fault = ("data.collate._target_", section.collate.target)
        collate = build.make_collate(section)
        self.at_fault = ("model._target_", self._config.model.target)
        try:
            return collate(samples)
        except UnequalSamples:
            raise
        except Exception as error:
            reason = first_line(error)
            if section.collate.target is not None:
                self.at_fault = ("data.collate._target_", section.collate.target)
                raise TargetError(f"makes no batch of two samples: {reason}") from error
            text = f"two samples make no batch: {reason}; data.collate=mine.batch names a function"
            raise DataUnavailable(f"{text} of a list of samples that makes one") from error

    def refusal(self, error: Exception) -> str:
        """Return that the target does not take the samples, with their shapes."""
        parts = tree_leaves(self._samples)
        shapes = [shape_of(part) for part in parts if isinstance(part, Tensor) and part.ndim]
        reason = first_line(error)
        data = self._config.data.target
        inputs = self._samples[0] if isinstance(self._samples, tuple | list) else None
        if isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.is_floating_point():
            reason += f"; {self._model_of_vectors(inputs.shape[1])}"
        if self.at_fault[0] == "loss._target_":
            reason += self._how_to_get_numbers()
        return f"does not take a sample of {data} ({', '.join(shapes)}): {reason}"

    def _model_of_vectors(self, size: int) -> str:
        """Return which model takes vectors of ``size`` numbers."""
        target = self._config.model.target
        if target.startswith("runner."):  # as of images: another model is needed
            return f"torch.nn.Linear with model.in_features={size} takes vectors of {size}"
        key = _size_of_inputs(self._model) if target.endswith(type(self._model).__name__) else None
        if key is not None:
            return f"model.{key}={size} takes vectors of {size}"
        text = f"the first layer of {target} must take vectors of {size}"
        if self._config.data.target == "runner.data.table.table":
            text += ", or data.columns=[NAME,NAME] chooses columns of the table"
        return text


def _size_of_inputs(model: nn.Module) -> str | None:
    """Return the argument of a model's class that is the size of its inputs, by its name."""
    parameters = inspect.signature(type(model)).parameters
    return next((name for name in _SIZES_OF_INPUTS if name in parameters), None)


def _were_broadcast(caught: Sequence[warnings.WarningMessage]) -> bool:
    """Return whether torch has warned that a loss compares tensors of other shapes."""
    return any("a target size" in str(warning.message) for warning in caught)


def _made_up(output: Tensor) -> Tensor:
    """Return values in the place of an output of the meta device."""
    if not output.is_floating_point():
        return torch.zeros(output.shape, dtype=output.dtype)
    values = torch.linspace(0.1, 0.9, output.numel()).reshape(output.shape)
    return values.to(output.dtype).requires_grad_()


def _are_numbers(targets: Any) -> bool:
    """Return whether targets are numbers to predict, and no probabilities of classes."""
    if targets is None or not targets.is_floating_point():
        return False
    return targets.shape[-1] == 1 or bool((targets.sum(-1) - 1).abs().max() > 1e-3)
