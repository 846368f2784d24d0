"""Evaluate held-out data: the loss, the accuracy of classes, and metrics of torchmetrics.

A metric is given by its name (``f1``, ``auroc``, ``mse``) or as a mapping with the ``_target_`` of
a :class:`torchmetrics.Metric`. What a name stands for depends on what is compared:

* classes: probabilities [N, C] with classes [N], whose ignored ones are left out
  (``torchmetrics.classification.Multiclass...``, the mean over classes where it has an average;
  ``accuracy`` is the share of correct ones);
* labels: probabilities [N, L] with labels [N, L] of 0 and 1, under binary cross entropy
  (``Binary...``, or ``Multilabel...`` for several labels);
* numbers: outputs and targets of one shape (``torchmetrics.regression``).
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from runner.booster import Plugin
from runner.booster.loss import WindowLoss
from runner.clip import Number, transfer
from runner.config.section import Target
from runner.run_folder import keys
from runner.train.beat import beat
from runner.train.build import maker
from runner.train.passes import Passes
from runner.train.state import held_out

MISSING = (
    'needs torchmetrics, which is not installed: pip install "clip-runner[metrics]"; '
    "only accuracy of classes works without"
)
NOTHING = (
    "cannot be computed: the targets are no classes of these outputs, nor numbers of their shape; "
    "give the model a loss(outputs, batch) that logs it, or use eval.metrics=[]"
)
_FULL = {
    "f1": "F1Score",
    "auroc": "AUROC",
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "r2": "R2Score",
}
_USUAL = {
    "classes": "accuracy, f1, precision, recall, auroc",
    "labels": "accuracy, f1, precision, recall, auroc",
    "numbers": "mse, mae, r2",
}
_COMPARED = {"classes": "classes", "labels": "labels of 0 and 1", "numbers": "numbers"}


class MetricError(ValueError):
    """A metric does not exist, or does not fit what the model and the data give."""

    def __init__(self, asked: str | Mapping[str, Any], message: str) -> None:
        super().__init__(message)
        self.asked = asked


class Evaluation:
    def __init__(self, passes: Passes, metrics: Sequence[str | Mapping[str, Any]] = ()) -> None:
        self._passes, self._metrics = passes, EvalMetrics(metrics, passes.loss)

    @torch.no_grad()
    def run(self, loader: Any) -> dict[str, float]:
        """Compute the mean loss over the items of ``loader``, and the metrics; a collective."""
        passes, loss, plugin = self._passes, self._passes.loss, self._passes.booster.plugin
        passes.model.eval()
        losses: list[Number] = []
        right: list[Number] = []
        items, graded, ungraded, samples = 0.0, 0.0, False, 0
        for idle, host in held_out(loader, plugin):
            beat()
            batch = passes.to_device(host)
            count = None if idle else loss.items(host).items
            items += count or 0.0
            graded += 0 if idle else loss.graded(host)
            samples += not idle
            outputs = passes.predict(batch)
            if outputs is None:
                continue  # The last stage, on another rank, has the outputs and the loss.
            losses.append(transfer.read(loss.sum(outputs, batch, count)))
            self._metrics.update(outputs, batch, idle)
            correct = loss.correct(outputs, batch)
            ungraded = ungraded or correct is None
            if correct is not None and not idle:
                right.append(correct)
        here = [transfer.add(losses), items, transfer.add(right), graded, ungraded, samples > 0]
        total, items, correct, graded, unknown, ranks = plugin.sum_over_data(here)
        passes.model.train()
        if not items:
            return {}
        metrics = {keys.EVAL_LOSS: total / items}
        if graded and not unknown:
            metrics[keys.EVAL_ACCURACY] = correct / graded
        return metrics | self._metrics.compute(plugin, int(ranks))


class _Compared(NamedTuple):
    kind: str
    size: int


class EvalMetrics:
    """Updates metrics with the batches of one evaluation after the other."""

    def __init__(self, asked: Sequence[str | Mapping[str, Any]], loss: WindowLoss) -> None:
        self._asked = {name_of(one): one for one in asked}
        for number, one in enumerate(asked):
            if name_of(one) in map(name_of, asked[:number]):
                raise MetricError(one, f"{name_of(one)} is there twice; give one another name")
        self._loss = loss
        self._made: dict[str, Any] = {}
        self._compared: _Compared | None = None
        self._group: dist.ProcessGroup | None = None

    def update(self, outputs: Any, batch: Any, idle: bool = False) -> None:
        """Add a batch; one without a sample of this rank only tells what is compared."""
        if not self._asked:
            return
        compared, predictions, targets = self._pair(outputs, batch)
        if self._compared is None:
            self._compared = compared
            self._made = self._make(compared, predictions.device)
        for name, metric in ({} if idle else self._made).items():
            with _naming(self._asked[name], compared):
                metric.update(predictions, targets)

    def compute(self, plugin: Plugin, ranks: int) -> dict[str, float]:
        """Return the metrics over the batches of all ranks, and begin anew; a collective.

        ``ranks`` is the number of data-parallel ranks that have a sample.
        """
        if not self._asked:
            return {}
        if ranks < plugin.data_size:
            one = next(iter(self._asked.values()))
            raise MetricError(one, f"needs held-out data of at least {plugin.data_size} batches")
        self._join(plugin)
        here = {name: self._value(name, metric) for name, metric in self._made.items()}
        self._made, self._compared = {}, None
        # The first of the ranks that have a value tells those that have none, of other stages.
        first = plugin.reports_metrics and plugin.data_rank == 0
        pairs = [(name in here, here.get(name, 0.0)) for name in self._asked]
        told = [float(value) if first else 0.0 for pair in pairs for value in pair]
        if plugin.world_size > 1:
            told = plugin.sum_over_ranks(told)
        found = dict(zip(self._asked, zip(told[::2], told[1::2], strict=True), strict=True))
        return {f"{keys.EVAL}{name}": value for name, (has, value) in found.items() if has}

    def try_on(self, outputs: Tensor, batch: Any) -> dict[str, bool | None]:
        """Try each metric on a batch; return whether a higher value is better, None if unknown."""
        made_up = torch.linspace(0.1, 0.9, outputs.numel()).reshape(outputs.shape)
        self.update(made_up.to(outputs.dtype), batch)
        for name, metric in self._made.items():
            metric.sync_on_compute = False
            self._value(name, metric)
        return {name: metric.higher_is_better for name, metric in self._made.items()}

    def _pair(self, outputs: Any, batch: Any) -> tuple[_Compared, Tensor, Tensor]:
        if (classified := self._loss.classified(outputs, batch)) is not None:
            logits, classes = (classified[0].flatten(0, -2), classified[1].flatten())
            counted = classes != self._loss.ignored
            chances = logits[counted].softmax(-1)
            return _Compared("classes", logits.shape[-1]), chances, classes[counted]
        pair = self._loss.paired(outputs, batch)
        if pair is None:
            raise MetricError(next(iter(self._asked.values())), NOTHING)
        outputs, targets = pair
        size = outputs.shape[-1] if outputs.ndim > 1 else 1
        if not self._loss.binary:
            return _Compared("numbers", size), outputs, targets
        flat = outputs.reshape(-1, size) if size > 1 else outputs.flatten()
        # torchmetrics would take a batch of logits that are all from 0 to 1 for probabilities.
        flat = flat.sigmoid() if self._loss.binary == "logits" else flat
        return _Compared("labels", size), flat, targets.reshape(flat.shape).long()

    def _make(self, compared: _Compared, device: torch.device) -> dict[str, Any]:
        """Make the metrics by their names; the accuracy of classes, always logged, is left out."""
        return {
            name: _metric(one, compared).to(device)
            for name, one in self._asked.items()
            if not (one == "accuracy" and compared.kind == "classes")
        }

    def _join(self, plugin: Plugin) -> None:
        """Let the metrics sum over the ranks that report: one of each data-parallel replica."""
        if plugin.world_size > 1 and self._group is None:
            flags = [0.0] * plugin.world_size
            flags[plugin.rank] = float(plugin.reports_metrics)
            reporting = [rank for rank, on in enumerate(plugin.sum_over_ranks(flags)) if on]
            self._group = cast(dist.ProcessGroup, dist.new_group(reporting))
        if not plugin.reports_metrics:
            self._made = {}
        for metric in self._made.values():
            metric.process_group = self._group

    def _value(self, name: str, metric: Any) -> float:
        assert self._compared is not None
        with _naming(self._asked[name], self._compared), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A class without samples, say.
            value = metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            message = f"must be one number, and this is {shape}: average it (average=macro, say)"
            raise MetricError(self._asked[name], message)
        return float(value)


@contextmanager
def _naming(asked: str | Mapping[str, Any], compared: _Compared) -> Iterator[None]:
    """Turn the error of a metric into one that names the metric."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"does not fit {_COMPARED[compared.kind]}: {lines[0]}"
        raise MetricError(asked, message) from error


def name_of(asked: str | Mapping[str, Any]) -> str:
    """Return the name of a metric: as given, or that of its class in small letters."""
    if isinstance(asked, str):
        return asked
    kind = str(asked["_target_"]).rpartition(".")[2]
    return str(asked.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower())


def _metric(asked: str | Mapping[str, Any], compared: _Compared) -> Any:
    """Make the metric of torchmetrics that is asked for by its name or a ``_target_``."""
    try:
        from torchmetrics import Metric
    except ImportError:
        raise MetricError(asked, MISSING) from None
    if isinstance(asked, str):
        return _named(asked, compared)
    arguments = {key: value for key, value in asked.items() if key not in ("_target_", "name")}
    try:
        made = maker(Target.of(asked["_target_"], arguments))()
    except Exception as error:
        raise MetricError(asked, f"cannot be made: {error}") from error
    if not isinstance(made, Metric):
        raise MetricError(asked, f"makes a {type(made).__name__}, not a torchmetrics.Metric")
    return made


def _named(name: str, compared: _Compared) -> Any:
    kind, size = compared
    make = _class(name, kind, size)
    if make is None:
        others = [_COMPARED[one] for one in _COMPARED if _class(name, one, 2)]
        message = "is no metric of torchmetrics"
        if others:
            message = f"compares {' or '.join(others)}, and the targets here are {_COMPARED[kind]}"
        raise MetricError(name, f"{message} (for {_COMPARED[kind]}: {_USUAL[kind]}, ...)")
    takes = inspect.signature(make).parameters
    given: dict[str, Any] = {one: size for one in ("num_classes", "num_labels") if one in takes}
    if "average" in takes and kind != "numbers":
        given["average"] = "micro" if name == "accuracy" else "macro"
    with _naming(name, compared):
        return make(**given)


def _class(name: str, kind: str, size: int) -> Any:
    """Return the class of torchmetrics for a name; None if there is none for what is compared."""
    from torchmetrics import classification, regression

    full = _FULL.get(name) or "".join(part.capitalize() for part in name.split("_"))
    several = "Binary" if size == 1 else "Multilabel"
    prefix = {"classes": "Multiclass", "labels": several, "numbers": ""}[kind]
    return getattr(regression if kind == "numbers" else classification, prefix + full, None)
