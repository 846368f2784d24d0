"""Metrics of held-out data by torchmetrics, summed over ranks.

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

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from runner.booster import Plugin
from runner.booster.loss import WindowLoss
from runner.config.section import Target
from runner.run_folder import keys
from runner.train import build

MISSING = (
    'needs torchmetrics, which is not installed: pip install "clip-runner[metrics]"; '
    "only accuracy of classes works without"
)
_FULL = {
    "f1": "F1Score",
    "auroc": "AUROC",
    "roc_auc": "AUROC",
    "mse": "MeanSquaredError",
    "mae": "MeanAbsoluteError",
    "r2": "R2Score",
}
_USUAL = {
    "classes": ("accuracy", "f1", "precision", "recall", "auroc"),
    "labels": ("accuracy", "f1", "precision", "recall", "auroc"),
    "numbers": ("mse", "mae", "r2"),
}
_COMPARED = {"classes": "classes", "labels": "labels of 0 and 1", "numbers": "numbers"}


class MetricError(ValueError):
    """A metric does not exist, or does not fit what the model and the data give."""

    def __init__(self, asked: str | Mapping[str, Any], message: str) -> None:
        super().__init__(message)
        self.asked = asked


class Compared(NamedTuple):
    """What metrics of a run compare."""

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
        self._compared: Compared | None = None
        self._made: dict[str, Any] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of the metrics in rows."""
        return [f"{keys.EVAL}{name}" for name in self._asked]

    def update(self, outputs: Any, batch: Any) -> None:
        """Add a batch; one without a sample of this rank is not added."""
        if not self._asked:
            return
        found = self.compared(outputs, batch)
        if found is None:
            one = next(iter(self._asked.values()))
            raise MetricError(one, _NOTHING)
        compared, predictions, targets = found
        if self._compared is None:
            self._compared = compared
            self._made = self.make(compared, predictions.device)
        for name, metric in self._made.items():
            with _naming(self._asked[name], compared):
                metric.update(predictions, targets)

    def compared(self, outputs: Any, batch: Any) -> tuple[Compared, Tensor, Tensor] | None:
        """Return what is compared, predictions and targets; None if shapes do not fit."""
        if (classified := self._loss.classified(outputs, batch)) is not None:
            logits, classes = (classified[0].flatten(0, -2), classified[1].flatten())
            counted = classes != self._loss.ignored
            chances = logits[counted].softmax(-1)
            return Compared("classes", logits.shape[-1]), chances, classes[counted]
        pair = self._loss.paired(outputs, batch)
        if pair is None:
            return None
        outputs, targets = pair
        size = outputs.shape[-1] if outputs.ndim > 1 else 1
        if not self._loss.binary:
            return Compared("numbers", size), outputs, targets
        flat = outputs.reshape(-1, size) if size > 1 else outputs.flatten()
        # torchmetrics would take a batch of logits that are all from 0 to 1 for probabilities.
        flat = flat.sigmoid() if self._loss.binary == "logits" else flat
        return Compared("labels", size), flat, targets.reshape(flat.shape).long()

    def make(self, compared: Compared, device: torch.device | None = None) -> dict[str, Any]:
        """Make the metrics by their names; the accuracy of classes, always logged, is left out."""
        made = {}
        for name, asked in self._asked.items():
            if asked == "accuracy" and compared.kind == "classes":
                continue
            metric = _named(asked, compared) if isinstance(asked, str) else _own(asked)
            made[name] = metric if device is None else metric.to(device)
        return made

    def compute(self, plugin: Plugin) -> dict[str, float]:
        """Return the metrics over the batches of all ranks, and begin anew; a collective."""
        if not self._asked:
            return {}
        states = {name: _state(metric) for name, metric in self._made.items()}
        mine = (self._compared, states) if plugin.reports_metrics else (None, {})
        every: list[Any] = [mine]
        if plugin.world_size > 1:
            every = [None] * plugin.world_size
            dist.all_gather_object(every, mine)
        parts = [states for compared, states in every if compared is not None]
        compared = next((compared for compared, _ in every if compared is not None), None)
        self._compared, self._made = None, {}
        if compared is None:
            return {}
        values = {}
        for name, metric in self.make(compared).items():
            for state, reduce in metric._reductions.items():
                setattr(metric, state, _reduced([part[name][state] for part in parts], reduce))
            values[f"{keys.EVAL}{name}"] = self._value(name, metric, compared)
        return values

    def try_on(self, outputs: Tensor, batch: Any) -> dict[str, bool | None]:
        """Try each metric on a batch; return whether a higher value is better, None if unknown."""
        made_up = _made_up(outputs)
        found = self.compared(made_up, batch)
        if found is None:
            raise MetricError(next(iter(self._asked.values())), _NOTHING)
        compared, predictions, targets = found
        higher = {}
        for name, metric in self.make(compared).items():
            with _naming(self._asked[name], compared):
                metric.update(predictions, targets)
            self._value(name, metric, compared)
            higher[name] = metric.higher_is_better
        return higher

    def _value(self, name: str, metric: Any, compared: Compared) -> float:
        metric.distributed_available_fn = lambda: False  # The states are those of all ranks.
        with _naming(self._asked[name], compared), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A class without samples, say.
            value = metric.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            message = f"must be one number, and this is {shape}: average it (average=macro, say)"
            raise MetricError(self._asked[name], message)
        return float(value)


_NOTHING = (
    "cannot be computed: the targets are no classes of these outputs, nor numbers of their shape; "
    "give the model a loss(outputs, batch) that logs it, or use eval.metrics=[]"
)


class _naming:
    """Turn the error of a metric into one that names the metric."""

    def __init__(self, asked: str | Mapping[str, Any], compared: Compared) -> None:
        self._asked, self._compared = asked, compared

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, MetricError):
            what = _COMPARED[self._compared.kind]
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise MetricError(self._asked, f"does not fit {what}: {lines[0]}") from error


def name_of(asked: str | Mapping[str, Any]) -> str:
    """Return the name of a metric: as given, or that of its class in small letters."""
    if isinstance(asked, str):
        return asked
    given = asked.get("name")
    if isinstance(given, str):
        return given
    kind = str(asked["_target_"]).rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()


def _named(name: str, compared: Compared) -> Any:
    """Make the metric of torchmetrics that a name stands for."""
    kind, size = compared
    here = _classes(name, kind, size)
    if not here:
        others = [_COMPARED[one] for one in _COMPARED if one != kind and _classes(name, one, 2)]
        usual = ", ".join(_USUAL[kind])
        if others:
            message = f"compares {' or '.join(others)}, and the targets here are {_COMPARED[kind]}"
        else:
            near = difflib.get_close_matches(name, [*_FULL, *_known()], n=1)
            message = "is no metric of torchmetrics" + (
                f"; did you mean {near[0]}?" if near else ""
            )
        raise MetricError(name, f"{message} (for {_COMPARED[kind]}: {usual}, ...)")
    [make] = here
    takes = inspect.signature(make).parameters
    given: dict[str, Any] = {}
    for option in ("num_classes", "num_labels"):
        if option in takes:
            given[option] = size
    if "average" in takes and kind != "numbers":
        given["average"] = "micro" if name == "accuracy" else "macro"
    with _naming(name, compared):
        return make(**given)


def _classes(name: str, kind: str, size: int) -> list[Callable[..., Any]]:
    """Return the class of torchmetrics for a name, if there is one for what is compared."""
    try:
        from torchmetrics import classification, regression
    except ImportError:
        raise MetricError(name, MISSING) from None
    full = _FULL.get(name) or "".join(part.capitalize() for part in name.split("_"))
    several = "Binary" if size == 1 else "Multilabel"
    prefix = {"classes": "Multiclass", "labels": several, "numbers": ""}[kind]
    found = getattr(regression if kind == "numbers" else classification, prefix + full, None)
    return [found] if isinstance(found, type) else []


def _known() -> Iterator[str]:
    """Yield the names of the metrics for classes and numbers."""
    from torchmetrics import classification, regression

    for module, prefix in ((classification, "Multiclass"), (regression, "")):
        for full in module.__all__:
            if full.startswith(prefix):
                yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", full.removeprefix(prefix)).lower()


def _own(asked: Mapping[str, Any]) -> Any:
    """Make a metric of a ``_target_``."""
    arguments = {key: value for key, value in asked.items() if key not in ("_target_", "name")}
    try:
        from torchmetrics import Metric
    except ImportError:
        raise MetricError(asked, MISSING) from None
    try:
        made = build.maker(Target.of(asked["_target_"], arguments))()
    except Exception as error:
        raise MetricError(asked, f"cannot be made: {error}") from error
    if not isinstance(made, Metric):
        kind = type(made).__name__
        message = f"makes a {kind}, not a torchmetrics.Metric, whose states are summed over ranks"
        raise MetricError(asked, message)
    return made


def _state(metric: Any) -> dict[str, Any]:
    """Return the states of a metric on the host."""
    return {
        name: state.cpu() if isinstance(state, Tensor) else [part.cpu() for part in state]
        for name, state in metric.metric_state.items()
    }


def _reduced(parts: list[Any], reduce: Callable[[Any], Any] | None) -> Any:
    """Combine the values of one state of all ranks, as ``torchmetrics.Metric.sync`` does."""
    if isinstance(parts[0], Tensor):
        together: Any = torch.stack(parts)
    else:
        together = [each for part in parts for each in part]
        if not together:
            return together
    return together if reduce is None else reduce(together)


def _made_up(outputs: Tensor) -> Tensor:
    """Return probabilities of the shape of outputs, on the host."""
    return torch.linspace(0.1, 0.9, outputs.numel()).reshape(outputs.shape).to(outputs.dtype)
