"""Metrics of evaluations, by torchmetrics."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch import Tensor

from runner.booster import Plugin
from runner.booster.loss import WindowLoss
from runner.run_folder import keys

MISSING = 'needs torchmetrics: pip install "clip-runner[metrics]"'
NOTHING = "cannot be computed: the targets are no classes of these outputs, nor numbers alike"
_CLASS_OF = {
    "f1": "F1Score",
    "auroc": "AUROC",
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "r2": "R2Score",
}
"""Classes of torchmetrics whose name is not the metric's in capitals."""

Metric = str | Mapping[str, Any]
"""A name (``f1``), or the ``_target_`` and the arguments of a :class:`torchmetrics.Metric`."""


class MetricError(ValueError):
    """A metric that cannot be computed; ``metric`` is as it was given."""

    def __init__(self, metric: Metric, message: str) -> None:
        super().__init__(message)
        self.metric = metric


class _Compared(NamedTuple):
    """What metrics compare."""

    kind: str  # "classes", "numbers" or "labels"
    size: int  # of the last dimension of the outputs
    predictions: Tensor
    targets: Tensor


class EvalMetrics:
    """Updates metrics with the batches of one evaluation after the other.

    A metric compares outputs and targets that are numbers of one shape; else probabilities [N, C]
    and classes [N] that are not ignored, or, under binary cross entropy, probabilities [N, L] and
    labels [N, L] of 0 and 1. A metric that is named takes the mean over the classes; ``accuracy``
    is the share of correct ones.
    """

    def __init__(self, metrics: Sequence[Metric], loss: WindowLoss) -> None:
        self._metrics = {name_of(metric): metric for metric in metrics}
        self._loss = loss
        self._objects: dict[str, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def update(self, outputs: Any, batch: Any, idle: bool = False) -> None:
        """Add a batch; one without a sample of this rank only tells what is compared."""
        if not self._metrics:
            return
        compared = self._compared(outputs, batch)
        for name, metric in self._metrics.items():
            if name == "accuracy" and compared.kind == "classes":
                continue  # the evaluation counts it
            with _naming(metric):
                if name not in self._objects:
                    new_object = _make(metric, compared.kind, compared.size)
                    self._objects[name] = new_object.to(compared.predictions.device)
                if not idle:
                    self._objects[name].update(compared.predictions, compared.targets)

    def compute(self, plugin: Plugin, ranks: int) -> dict[str, float]:
        """Return the metrics over all ranks, ``ranks`` of which had a batch, and begin anew."""
        if not self._metrics:
            return {}
        if ranks < plugin.data_size:
            first = next(iter(self._metrics.values()))
            message = f"needs held-out data of at least {plugin.data_size} batches"
            raise MetricError(first, message)
        if plugin.world_size > 1 and self._group is None:
            self._group = _reporting_ranks(plugin)
        objects = self._objects
        self._objects = {}
        values: dict[str, float] = {}
        if plugin.reports_metrics:
            for name, metric in objects.items():
                metric.process_group = self._group
                values[keys.EVAL + name] = self._value(name, metric)
        values_of_ranks = [values] * plugin.world_size
        if plugin.world_size > 1:
            dist.all_gather_object(values_of_ranks, values)
        for values_of_rank in values_of_ranks:  # ranks of other stages have none
            if values_of_rank:
                return values_of_rank
        return {}

    def try_on(self, outputs: Tensor, batch: Any) -> None:
        """Compute the metrics of made-up outputs of the same shape."""
        made_up = torch.linspace(0.1, 0.9, outputs.numel()).reshape(outputs.shape)
        self.update(made_up.to(outputs.dtype), batch)
        for name, metric in self._objects.items():
            metric.sync_on_compute = False
            self._value(name, metric)

    def _compared(self, outputs: Any, batch: Any) -> _Compared:
        classified = self._loss.compares.classified(outputs, batch)
        if classified is not None:
            logits = classified[0].flatten(0, -2)
            classes = classified[1].flatten()
            counted = classes != self._loss.ignored
            probabilities = logits[counted].softmax(-1)
            return _Compared("classes", logits.shape[-1], probabilities, classes[counted])
        pair = self._loss.compares.paired(outputs, batch)
        if pair is None:
            raise MetricError(next(iter(self._metrics.values())), NOTHING)
        outputs, targets = pair
        size = outputs.shape[-1] if outputs.ndim > 1 else 1
        if not self._loss.binary:
            return _Compared("numbers", size, outputs, targets)
        flat = outputs.reshape(-1, size) if size > 1 else outputs.flatten()
        # torchmetrics would take a batch of logits that are all from 0 to 1 for probabilities.
        if self._loss.binary == "logits":
            flat = flat.sigmoid()
        return _Compared("labels", size, flat, targets.reshape(flat.shape).long())

    def _value(self, name: str, metric: Any) -> float:
        # Metrics warn of a class without samples, for example.
        with _naming(self._metrics[name]), warnings.catch_warnings(action="ignore"):
            return float(metric.compute())


def _reporting_ranks(plugin: Plugin) -> dist.ProcessGroup:
    """Return the group that metrics sum over: one rank of each data-parallel replica."""
    flags = [False] * plugin.world_size
    dist.all_gather_object(flags, plugin.reports_metrics)
    reporting = [rank for rank, reports in enumerate(flags) if reports]
    group = dist.group.WORLD if all(flags) else dist.new_group(reporting)
    return cast(dist.ProcessGroup, group)


@contextmanager
def _naming(metric: Metric) -> Iterator[None]:
    """Context whose exceptions become a MetricError."""
    try:
        yield
    except ModuleNotFoundError:
        raise MetricError(metric, MISSING) from None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise MetricError(metric, f"does not fit: {type(error).__name__}: {reason}") from error


def name_of(metric: Metric) -> str:
    """Return the name of a metric: as given, or the name of its class in small letters."""
    if isinstance(metric, str):
        return metric
    kind = str(metric["_target_"]).rpartition(".")[2]
    return str(metric.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower())


def _make(metric: Metric, kind: str, size: int) -> Any:
    if not isinstance(metric, str):
        arguments = {key: value for key, value in metric.items() if key != "name"}
        return instantiate(arguments, _convert_="all")
    import torchmetrics

    default = "".join(part.capitalize() for part in metric.split("_"))
    make = getattr(torchmetrics, _CLASS_OF.get(metric, default))
    if kind == "numbers":
        return make()
    task = "multiclass"
    if kind == "labels":
        task = "binary" if size == 1 else "multilabel"
    arguments = {
        "task": task,
        "num_classes": size,
        "num_labels": size,
        "average": "micro" if metric == "accuracy" else "macro",
    }
    parameters = inspect.signature(make.__new__).parameters
    return make(**{name: value for name, value in arguments.items() if name in parameters})
