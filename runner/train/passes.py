"""Passes of a boosted model over windows and held-out data, and their items over all ranks."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Booster, ModelWrapper, OptimizerWrapper, Plugin
from runner.booster.batch import mapped
from runner.booster.loss import Count, WindowLoss
from runner.booster.measurement import settle
from runner.clip import Number, transfer
from runner.clip.norms import powers_of
from runner.data.order import PartitionedBatches
from runner.data.stream import StreamLoader, checksum
from runner.run_folder import keys
from runner.train.stop import beat
from runner.train.windows import Window, Windows, has_no_sample, held_out

SAME_SAMPLES = (
    "all {} data-parallel ranks read the same first batch: use plugin.prepare_dataloader, a "
    "DistributedSampler, or a stream of this rank's samples alone"
)
OTHER_SAMPLES = (
    "the stream yields other samples on each rank, so that those which a rank does not keep are "
    "lost: set shards_itself = True in its class if it divides itself over ranks"
)
ONE_SAMPLE = (
    "batch norm needs two samples or more, and a microbatch of this rank has one: leave out the "
    "last, short microbatch of an epoch by data.drop_last=true (drop_last=True of the loader), or "
    "choose another data.batch_size"
)
NO_NOISE_SCALE = "needs two or more microbatches of plugin=single or ddp, and clip.norm_type=2"
NO_UPDATE_RATIO = "copies the weights before a step: use clip.step_in_backward=false"
ENDED = (
    "the data of some of the {} data-parallel ranks has ended before that of the others: use "
    "plugin.prepare_dataloader, or let an IterableDataset yield equally many batches on each rank"
)
MISSING = 'needs torchmetrics: pip install "clip-runner[metrics]"'
NOTHING = "cannot be computed: the targets are no classes of these outputs, nor numbers alike"
_FULL = {"f1": "F1Score", "auroc": "AUROC", "mse": "MeanSquaredError"}
_FULL |= {"mae": "MeanAbsoluteError", "r2": "R2Score"}


class Asked(NamedTuple):
    stop: int = 0  # number of a signal, or 0
    save: bool = False


Sums = tuple[Count, Asked, bool]
"""Counts of a window over all ranks, what some rank asks for, whether it is the epoch's last."""


def count(
    window: Window, windows: Windows, loss: WindowLoss, plugin: Plugin, first: bool, asked: Asked
) -> tuple[list[float | None], Callable[[], Sums]]:
    """Count a window on the host, and start to sum the counts over all data-parallel ranks.

    Returns the items of each microbatch of this rank, None for one that it has no sample of, and
    what waits for the sums. What ranks ask travels with them, so that it costs no collective.
    """
    numbered, loader = enumerate(window.batches, window.first), windows.loader
    held = [None if has_no_sample(loader, at) else loss.items(batch) for at, batch in numbered]
    items = [None if one is None else one.items for one in held]
    here = [one for one in held if one is not None]
    own = here[0] if len(here) == 1 else Count(*map(sum, zip((0.0, 0, 0), *here, strict=True)))
    if plugin.world_size == 1:
        return items, lambda: (own, asked, window.last)
    size, length = plugin.data_size, len(window.batches)
    alike = isinstance(loader, StreamLoader) and loader.mark
    mark = 0
    if first and size > 1:
        mark = alike or (0 if _is_partitioned(loader) else checksum(window.batches[0]))
    mine = [*own, window.last, length, length**2, mark, mark**2]
    # Every rank may ask, also one whose samples another rank counts.
    counted = mine if plugin.reports_metrics else [0.0] * len(mine)
    summing = plugin.start_sum_over_ranks([*counted, asked.stop > 0, asked.save])

    def wait() -> Sums:
        all_items, *others = summing()
        samples, tokens, ended, lengths, squares, marks, squared_marks, *some = map(int, others)
        same = squared_marks * size == marks**2
        if mark and same != bool(alike):
            raise ValueError(OTHER_SAMPLES if alike else SAME_SAMPLES.format(size))
        # A last window can have fewer batches here than on another rank.
        if (0 < ended < size and not windows.uneven) or squares * size != lengths**2:
            raise ValueError(ENDED.format(size))
        stop = asked.stop
        if some[0]:  # Some rank asks to stop; which signal did, all of them learn.
            dist.all_reduce(signal := torch.tensor(stop), dist.ReduceOp.MAX)
            stop = int(signal)
        return Count(all_items, samples, tokens), Asked(stop, some[1] > 0), ended == size

    return items, cache(wait)


def _is_partitioned(loader: Any) -> bool:
    if isinstance(loader, StreamLoader):
        return loader.dataset.divided_by != "itself"
    parts = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return any(isinstance(part, PartitionedBatches | DistributedSampler) for part in parts)


@dataclass
class Passes:
    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    loss: WindowLoss
    device: torch.device
    region: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()

    def __post_init__(self) -> None:
        # Without autocast the wrapper would only cost a call.
        self._module = self.model if self.model.dtype else self.model.module

    def accumulate(
        self,
        batches: Sequence[Any],
        counts: Sequence[float | None],
        items: Callable[[], float],
        after_each: Callable[[int, int], None],
    ) -> Number:
        """Run forward and backward passes of a window; return this rank's share of its loss."""

        def weight() -> float:
            # Ranks average their gradients; the loss is divided by the items of all of them.
            return self.booster.plugin.data_size / self.loss.divisor(items())

        total: Tensor | None = None
        for number, (batch, own) in enumerate(zip(batches, counts, strict=True), 1):
            beat()
            last = number == len(batches)
            # Ranks synchronise their gradients on the last microbatch only.
            with nullcontext() if last else self.booster.no_sync(self.model, self.optimizer):
                try:
                    loss = self._train(batch, own, weight)
                except (ValueError, RuntimeError) as error:
                    if _too_few_for_batch_norm(error):
                        error.add_note(ONE_SAMPLE)
                    raise
            if not last:  # after that one comes the step
                after_each(number, len(batches))
            total = loss if total is None else total + loss
        assert total is not None
        return (total.item() if transfer.can_read(self.device) else total) * weight()

    def settle(self, batches: Sequence[Any]) -> None:
        """Find what the mean of the loss divides by, once; a collective."""
        settle(
            self.loss,
            self.model.module,
            batches,
            self.model.pipeline,
            together=self.booster.plugin.world_size > 1,
            to_device=self.to_device,
        )

    def _settled(self, held: Iterator[tuple[bool, Any]]) -> Iterator[tuple[bool, Any]]:
        """Measure the loss on batches that may tell more of it; a collective."""
        for idle, batch in held:
            if not self.loss.is_settled:
                self.settle([batch])
            yield idle, batch

    def _train(self, host: Any, count: float | None, weight: Callable[[], float]) -> Tensor:
        batch = self.to_device(host)
        if self.model.pipeline is None:
            with self.region("forward"):
                outputs = self.loss.forward(self._module, batch)
                loss = self.loss.sum(outputs, batch, count)
            with self.region("backward"):
                self.optimizer.backward(loss, weight())
            return loss.detach()
        with self.region("forward"):  # A schedule mixes forward and backward passes.
            return self.booster.train_pipeline(
                self.model, self.optimizer, self.loss, (host, batch), weight(), count is not None
            )

    @torch.no_grad()
    def evaluate(self, loader: Any, metrics: EvalMetrics) -> dict[str, float]:
        """Compute the mean loss over the items of ``loader``, and the metrics; a collective."""
        loss, plugin, pipeline = self.loss, self.booster.plugin, self.model.pipeline
        self.model.eval()
        losses: list[Number] = []
        right: list[Number] = []
        graded: list[Number] = []
        items, ungraded, samples = 0.0, False, False
        for idle, host in self._settled(held_out(loader, plugin)):
            beat()
            batch, count = self.to_device(host), None if idle else loss.items(host).items
            if count is not None:
                items, samples = items + count, True
            if pipeline is None:
                outputs = loss.forward(self._module, batch)
            else:
                outputs = pipeline.evaluate(loss.call(batch).only_tensor())
            if outputs is None:
                continue  # The last stage, on another rank, has the outputs and the loss.
            losses.append(transfer.read(loss.sum(outputs, batch, count)))
            metrics.update(outputs, batch, idle)
            correct = loss.correct(outputs, batch)
            ungraded = ungraded or correct is None
            if correct is not None and not idle:
                right.append(correct[0])
                graded.append(correct[1])
        counts = transfer.add(right), transfer.add(graded)
        here = [transfer.add(losses), items, *counts, ungraded, samples]
        total, items, rights, classes, unknown, ranks = plugin.sum_over_data(here)
        self.model.train()
        if not items:
            return {}
        found = {keys.EVAL_LOSS: total / items}
        if classes and not unknown:
            found[keys.EVAL_ACCURACY] = rights / classes
        return found | metrics.compute(plugin, int(ranks))

    @torch.no_grad()
    def square_of_gradients(self) -> Number:
        """Return ‖G‖² of what backward passes have added up on this rank, unscaled."""
        layout = self.optimizer.layout
        shards = [shard for shard in layout.shards if shard.param.grad is not None]
        gradients = [cast(Tensor, shard.param.grad) for shard in shards]
        scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.scale
        return powers_of(layout, shards, gradients, 2.0)[0] / scale**2

    def to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        if not isinstance(batch, Tensor) and callable(move := getattr(batch, "to", None)):
            return move(self.device)
        return mapped(batch, lambda t: t.to(self.device, non_blocking=True))


Wanted = str | Mapping[str, Any]  # a metric


class MetricError(ValueError):
    def __init__(self, asked: Wanted, message: str) -> None:
        super().__init__(message)
        self.asked = asked


class EvalMetrics:
    """Updates metrics with the batches of one evaluation after the other.

    A metric is given by its name (``f1``, ``auroc``, ``mse``) or as a mapping with the ``_target_``
    of a :class:`torchmetrics.Metric`. It compares outputs and targets that are numbers of one
    shape; else probabilities [N, C] and classes [N] that are not ignored, or, under binary cross
    entropy, probabilities [N, L] and labels [N, L] of 0 and 1. One that is named takes the mean
    over the classes; ``accuracy`` is the share of correct ones.
    """

    def __init__(self, asked: Sequence[Wanted], loss: WindowLoss) -> None:
        self._asked, self._loss = {name_of(one): one for one in asked}, loss
        self._made: dict[str, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def update(self, outputs: Any, batch: Any, idle: bool = False) -> None:
        """Add a batch; one without a sample of this rank only tells what is compared."""
        if not self._asked:
            return
        kind, size, predictions, targets = self._compared(outputs, batch)
        for name, one in self._asked.items():
            if (name, kind) == ("accuracy", "classes"):
                continue  # the evaluation counts it
            with _naming(one):
                if name not in self._made:
                    self._made[name] = _made(one, kind, size).to(predictions.device)
                if not idle:
                    self._made[name].update(predictions, targets)

    def compute(self, plugin: Plugin, ranks: int) -> dict[str, float]:
        """Return the metrics over all ranks, so many of which had a batch, and begin anew."""
        if not self._asked:
            return {}
        if ranks < plugin.data_size:
            one = next(iter(self._asked.values()))
            raise MetricError(one, f"needs held-out data of at least {plugin.data_size} batches")
        if plugin.world_size > 1 and self._group is None:
            # Metrics sum over the ranks that report: one of each data-parallel replica.
            flags = [False] * plugin.world_size
            dist.all_gather_object(flags, plugin.reports_metrics)
            reporting = [rank for rank, reports in enumerate(flags) if reports]
            every = dist.group.WORLD if all(flags) else dist.new_group(reporting)
            self._group = cast(dist.ProcessGroup, every)
        made, self._made = self._made, {}
        here = {}
        for name, metric in made.items() if plugin.reports_metrics else ():
            metric.process_group = self._group
            here[keys.EVAL + name] = self._value(name, metric)
        found = [here] * plugin.world_size
        if plugin.world_size > 1:  # ranks of other stages have none
            dist.all_gather_object(found, here)
        return next(filter(None, found), {})

    def try_on(self, outputs: Tensor, batch: Any) -> None:
        made_up = torch.linspace(0.1, 0.9, outputs.numel()).reshape(outputs.shape)
        self.update(made_up.to(outputs.dtype), batch)
        for name, metric in self._made.items():
            metric.sync_on_compute = False
            self._value(name, metric)

    def _compared(self, outputs: Any, batch: Any) -> tuple[str, int, Tensor, Tensor]:
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
        # They warn of a class without samples, say.
        with _naming(self._asked[name]), warnings.catch_warnings(action="ignore"):
            return float(metric.compute())


@contextmanager
def _naming(asked: Wanted) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError:
        raise MetricError(asked, MISSING) from None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise MetricError(asked, f"does not fit: {type(error).__name__}: {reason}") from error


def name_of(asked: Wanted) -> str:
    """Return the name of a metric: as given, or that of its class in small letters."""
    if isinstance(asked, str):
        return asked
    kind = str(asked["_target_"]).rpartition(".")[2]
    return str(asked.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower())


def _made(asked: Wanted, kind: str, size: int) -> Any:
    if not isinstance(asked, str):
        named = {key: value for key, value in asked.items() if key != "name"}
        return instantiate(named, _convert_="all")
    import torchmetrics

    full = _FULL.get(asked) or "".join(part.capitalize() for part in asked.split("_"))
    make = getattr(torchmetrics, full)
    if kind == "numbers":
        return make()
    labels = "binary" if size == 1 else "multilabel"
    given: dict[str, Any] = {"task": "multiclass" if kind == "classes" else labels}
    given |= {"num_classes": size, "num_labels": size}
    given["average"] = "micro" if asked == "accuracy" else "macro"
    taken = inspect.signature(make.__new__).parameters.keys() & given.keys()
    return make(**{name: given[name] for name in taken})


def _too_few_for_batch_norm(error: BaseException | None) -> bool:
    """Return whether torch's batch norm has refused a single sample, also inside of a pipeline."""
    while error is not None:
        if "Expected more than 1 value per channel" in str(error):
            return True
        error = error.__cause__
    return False
