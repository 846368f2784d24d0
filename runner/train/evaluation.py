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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from runner.booster import Plugin
from runner.booster.loss import WindowLoss
from runner.clip import Number, transfer
from runner.config.section import Target
from runner.run_folder import keys
from runner.train.build import maker
from runner.train.passes import Passes
from runner.train.state import held_out
from runner.train.stop import beat

Asked = str | Mapping[str, Any]

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


class MetricError(ValueError):
    """A metric does not exist, or does not fit what the model and the data give."""

    def __init__(self, asked: Asked, message: str) -> None:
        super().__init__(message)
        self.asked = asked


class Evaluation:
    def __init__(self, passes: Passes, metrics: Sequence[Asked] = ()) -> None:
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


class EvalMetrics:
    """Updates metrics with the batches of one evaluation after the other."""

    def __init__(self, asked: Sequence[Asked], loss: WindowLoss) -> None:
        self._asked, self._loss = {name_of(one): one for one in asked}, loss
        self._made: dict[str, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def update(self, outputs: Any, batch: Any, idle: bool = False) -> None:
        """Add a batch; one without a sample of this rank only tells what is compared."""
        if not self._asked:
            return
        kind, size, predictions, targets = self._compared(outputs, batch)
        for name, one in self._asked.items():
            if name not in self._made and (name, kind) != ("accuracy", "classes"):
                with _naming(one):
                    made = _named(one, kind, size) if isinstance(one, str) else _made(one)
                    self._made[name] = made.to(predictions.device)
            if name in self._made and not idle:
                with _naming(one):
                    self._made[name].update(predictions, targets)

    def compute(self, plugin: Plugin, ranks: int) -> dict[str, float]:
        """Return the metrics over the batches of all ranks, and begin anew; a collective.

        ``ranks`` is the number of data-parallel ranks that have a sample.
        """
        if not self._asked:
            return {}
        if ranks < plugin.data_size:
            one = next(iter(self._asked.values()))
            raise MetricError(one, f"needs held-out data of at least {plugin.data_size} batches")
        if plugin.world_size > 1 and self._group is None:
            # Metrics sum over the ranks that report: one of each data-parallel replica.
            flags = [0.0] * plugin.world_size
            flags[plugin.rank] = float(plugin.reports_metrics)
            reporting = [rank for rank, on in enumerate(plugin.sum_over_ranks(flags)) if on]
            self._group = cast(dist.ProcessGroup, dist.new_group(reporting))
        made, self._made = self._made, {}
        here = {}
        for name, metric in made.items() if plugin.reports_metrics else ():
            metric.process_group = self._group
            here[name] = self._value(name, metric)
        # The first of the ranks that have a value tells those that have none, of other stages.
        first = plugin.reports_metrics and plugin.data_rank == 0
        pairs = [(name in here, here.get(name, 0.0)) for name in self._asked]
        told = [float(value) if first else 0.0 for pair in pairs for value in pair]
        if plugin.world_size > 1:
            told = plugin.sum_over_ranks(told)
        found = zip(self._asked, told[::2], told[1::2], strict=True)
        return {f"{keys.EVAL}{name}": value for name, has, value in found if has}

    def try_on(self, outputs: Tensor, batch: Any) -> None:
        """Try each metric on a batch, in this process alone."""
        made_up = torch.linspace(0.1, 0.9, outputs.numel()).reshape(outputs.shape)
        self.update(made_up.to(outputs.dtype), batch)
        for name, metric in self._made.items():
            metric.sync_on_compute = False
            self._value(name, metric)

    def _compared(self, outputs: Any, batch: Any) -> tuple[str, int, Tensor, Tensor]:
        """Return what is compared, the number of outputs, predictions and targets."""
        if (classified := self._loss.classified(outputs, batch)) is not None:
            logits, classes = (classified[0].flatten(0, -2), classified[1].flatten())
            counted = classes != self._loss.ignored
            return "classes", logits.shape[-1], logits[counted].softmax(-1), classes[counted]
        pair = self._loss.paired(outputs, batch)
        if pair is None:
            raise MetricError(next(iter(self._asked.values())), NOTHING)
        outputs, targets = pair
        size = outputs.shape[-1] if outputs.ndim > 1 else 1
        if not self._loss.binary:
            return "numbers", size, outputs, targets
        flat = outputs.reshape(-1, size) if size > 1 else outputs.flatten()
        # torchmetrics would take a batch of logits that are all from 0 to 1 for probabilities.
        flat = flat.sigmoid() if self._loss.binary == "logits" else flat
        return "labels", size, flat, targets.reshape(flat.shape).long()

    def _value(self, name: str, metric: Any) -> float:
        with _naming(self._asked[name]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A class without samples, say.
            return float(metric.compute())


@contextmanager
def _naming(asked: Asked) -> Iterator[None]:
    try:
        yield
    except MetricError:
        raise
    except ModuleNotFoundError:
        raise MetricError(asked, MISSING) from None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise MetricError(asked, f"does not fit: {type(error).__name__}: {reason}") from error


def name_of(asked: Asked) -> str:
    """Return the name of a metric: as given, or that of its class in small letters."""
    if isinstance(asked, str):
        return asked
    kind = str(asked["_target_"]).rpartition(".")[2]
    return str(asked.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower())


def _made(asked: Mapping[str, Any]) -> Any:
    arguments = {key: value for key, value in asked.items() if key not in ("_target_", "name")}
    return maker(Target.of(asked["_target_"], arguments))()


def _named(name: str, kind: str, size: int) -> Any:
    from torchmetrics import classification, regression

    full = _FULL.get(name) or "".join(part.capitalize() for part in name.split("_"))
    several = "Binary" if size == 1 else "Multilabel"
    prefix = {"classes": "Multiclass", "labels": several, "numbers": ""}[kind]
    place = regression if kind == "numbers" else classification
    make = getattr(place, prefix + full, None)
    if make is None:
        raise MetricError(name, f"is no metric of {place.__name__} for {kind} ({prefix}{full})")
    takes = inspect.signature(make).parameters
    given: dict[str, Any] = {one: size for one in ("num_classes", "num_labels") if one in takes}
    if "average" in takes and kind != "numbers":
        given["average"] = "micro" if name == "accuracy" else "macro"
    return make(**given)
