"""The work of one rank in a verification: both sides step by step, one mode after another.

The plugin's side is the training loop of a run, with a hook before and after clipping.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from runner.booster import Booster, NonFiniteGradient, Plugin
from runner.booster.batch import mapped
from runner.booster.loss import Criterion
from runner.clip import ClipMode, Decision, GradStats, Layout, ParamShard
from runner.clip import build as build_mode
from runner.clip.mode import NEVER
from runner.config.modes import MODES
from runner.config.notation import Duration
from runner.config.schema import RunConfig
from runner.data.dataset import collate_pairs, length_of
from runner.parallel.collectives import on_first
from runner.parallel.full_state_dict import gathered
from runner.run_folder import keys
from runner.telemetry.sinks import Sink
from runner.tools.comparison import (
    Naive,
    SideMetrics,
    compare_mode,
    compare_step,
    naive_norm,
    outcome,
    relative,
    tensor_errors,
    worst_naive,
)
from runner.tools.reference import Reference, windows
from runner.train import build
from runner.train.trainer import Log, Trainer

T = TypeVar("T")

BINDS = 0.1
"""Ratio of a derived threshold to the largest value of the first step that is compared with it."""

Seen = Callable[[list[SideMetrics], dict[str, Tensor], list[Naive | None]], None]
"""Called in each step on the first rank with the metrics of all ranks, the clipped gradients of the
whole model, and the naive norm of each rank."""


def execute(config: RunConfig, sinks: Sequence[Sink] = ()) -> dict[str, Any]:
    """Compare the plugin with one process in each mode of ``verify.modes``."""
    if build.device_of(config.device).type == "cuda" and config.verify.dtype == "float32":
        # cuDNN uses TF32 by default, which has ten bits of mantissa.
        torch.backends.cudnn.allow_tf32 = False
    # torch warns of slow redistribution: speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plugin = config.plugin.model_copy(update={"param_dtype": None})
    comparable = config.model_copy(update={"plugin": plugin})
    modes = config.verify.modes or [config.clip.mode]
    causes: list[str] = []
    try:
        compared = [_compare(comparable, name, causes) for name in modes]
    except NonFiniteGradient as error:
        error.advice = ""  # clip.nonfinite=skip does not help here
        error.add_note("a verification compares every step, whatever clip.nonfinite is")
        raise
    except RuntimeError as error:
        if config.verify.dtype == "float64" and "dtype" in str(error):
            error.add_note("if the model computes in float32 only, use verify.dtype=float32")
        raise
    here = [one for one in compared if one is not None]
    verify = config.verify
    note = (
        f"both sides step by plain SGD at a constant rate of {verify.lr:g} instead of "
        f"{config.optimizer.target.rpartition('.')[2]} and its schedule (modes that need the "
        f"optimizer: AdamW at {verify.lr / 10:g}), in {verify.dtype} and without dropout: adaptive "
        "steps hide a gradient of the wrong scale"
    )
    return outcome(here, [note], causes, config.verify.bound) if here else {}


def _compare(config: RunConfig, name: str, causes: list[str]) -> dict[str, Any] | None:
    """Train both sides in one clipping mode; only the first rank has a result."""
    bound = config.verify.bound
    plugin = build.make_plugin(config)
    mode, derived = make_mode(config, name)
    data = make_samples(config, plugin.data_size)
    losses = _Losses()
    trainer = _trainer(config, plugin, data, mode, [] if plugin.rank else [losses])
    pipeline = trainer.model.pipeline
    chunks = 1 if pipeline is None else pipeline.microbatches

    def one_process() -> Reference:
        again, _ = make_mode(config, name)  # a mode is bound to one layout
        again.threshold = mode.threshold
        return make_reference(config, again, plugin.data_size, data, chunks)

    if derived:
        peak = math.nan if plugin.rank else one_process().peak()
        mode.threshold = _from_all(peak)[0] * BINDS
    reference = None if plugin.rank else one_process()
    steps: list[dict[str, Any]] = []

    def seen(
        ranks: list[SideMetrics], gradients: dict[str, Tensor], naive: list[Naive | None]
    ) -> None:
        assert reference is not None
        metrics, loss, wanted = reference.step()
        one = compare_step(len(steps) + 1, ranks, gradients, metrics, wanted, bound)
        one["naive"] = worst_naive(naive, metrics.norm)
        steps.append(one | {"loss": {"reference": loss}})

    _watch(mode, trainer, seen)
    trainer.fit()
    drifted = _drifted(trainer.optimizer.layout)
    weights = _whole(trainer, lambda p: p)
    if reference is None:
        return None
    wanted = reference.weights()
    weights = {name: tensor for name, tensor in weights.items() if name in wanted}
    for step, loss in zip(steps, losses, strict=True):
        step["loss"]["plugin"] = loss
    causes += _causes(config, reference, **steps[0]["loss"])
    errors = tensor_errors(weights, wanted)
    about = {"mode": name, "threshold": mode.threshold, "derived": derived}
    return {**about, **compare_mode(steps, errors, drifted, bound)}


def make_reference(
    config: RunConfig, mode: ClipMode, parts: int, data: Dataset[Any], chunks: int = 1
) -> Reference:
    """Make the training in one process that reads the samples of ``parts`` ranks."""
    batches = windows(config, parts, data, _collate_for(config), chunks)
    return Reference(*_parts(config, mode), mode, batches)


def _trainer(
    config: RunConfig, plugin: Plugin, data: Dataset[Any], mode: ClipMode, sinks: Sequence[Sink]
) -> Trainer:
    """Make a trainer of ``verify.steps`` steps under ``plugin``, as the reference trains."""
    model, criterion, optimizer = _parts(config, mode)
    loader = plugin.prepare_dataloader(
        data,
        batch_size=config.data.batch_size,
        shuffle=True,
        drop_last=config.data.drop_last,
        seed=config.seed,
        collate_fn=_collate_for(config),
    )
    return Trainer(
        model,
        loader,
        Duration(config.verify.steps, "ba"),
        algorithms=mode,
        optimizers=optimizer,
        criterion=criterion,
        booster=Booster(plugin=plugin, nonfinite="error"),
        accumulation_steps=config.accumulation.steps,
        log=Log(sinks, bar=False),
    )


def _dtype_of(config: RunConfig) -> torch.dtype:
    return torch.float64 if config.verify.dtype == "float64" else torch.float32


def _collate_for(config: RunConfig) -> Callable[[Any], Any]:
    """Return what collates samples to a batch with floating-point tensors of ``verify.dtype``."""
    dtype = _dtype_of(config)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return lambda samples: mapped(collate_pairs(samples), convert)


def make_samples(config: RunConfig, parts: int) -> Dataset[Any]:
    """Return the training data of both sides, the first samples of a stream; a collective."""
    data: Any = build.make_data(config.data).train
    if length_of(data) is None:
        microbatches = config.verify.steps * config.accumulation.steps * parts
        stream, samples = data, microbatches * config.data.batch_size
        data = on_first(lambda: list(islice(stream, samples)))
    return data  # type: ignore[no-any-return]


def make_mode(config: RunConfig, name: str) -> tuple[ClipMode, bool]:
    """Make a clipping mode; also return True if its threshold is still to be derived."""
    chosen = config.clip
    if name == chosen.mode:
        return build_mode(chosen.kind, **chosen.options), False
    described = MODES[name]
    info = described.info
    # A mode that needs the optimizer has nothing to compare with in the first step.
    known = info.needs_optimizer or "threshold" in described.at_once
    derived = info.takes_threshold and not known
    threshold = NEVER if derived else info.published[0][0] if info.needs_optimizer else None
    options = {"threshold": threshold, "norm_type": chosen.norm_type}
    return build_mode(name, **{**options, **described.at_once}), derived


def _parts(
    config: RunConfig, mode: ClipMode
) -> tuple[nn.Module, Criterion | None, torch.optim.Optimizer]:
    """Make a model without dropout and with the same weights on every rank, criterion, optimizer.

    That is plain SGD, because the steps of Adam and similar optimizers hide a wrong scale.
    """
    torch.manual_seed(config.seed)
    device, dtype = build.device_of(config.device), _dtype_of(config)
    model = build.maker(config.model)().to(device, dtype)
    assert isinstance(model, nn.Module)
    switch_off_dropout(model)
    parameters = dict.fromkeys(model.parameters())
    criterion = build.make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(device, dtype)
    if mode.info.needs_optimizer:
        return model, criterion, torch.optim.AdamW(parameters, lr=config.verify.lr / 10, eps=1e-3)
    return model, criterion, torch.optim.SGD(parameters, lr=config.verify.lr)


def switch_off_dropout(model: nn.Module) -> int:
    """Set all dropout probabilities to 0, because ranks draw other elements than one process."""
    found = 0
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in list(vars(module).items()):
            is_chance = isinstance(value, int | float) and not isinstance(value, bool)
            named = "drop" in name.lower() or (drops and name in ("p", "prob"))
            if is_chance and named and 0 < value <= 1:
                setattr(module, name, 0.0)
                found += 1
    return found


def _watch(mode: ClipMode, trainer: Trainer, seen: Seen) -> None:
    """Let ``mode`` report its metrics and the gradients before and after it clips."""

    class Watched(type(mode)):  # type: ignore[misc]
        def clip(self, layout: Layout, stats: GradStats | None = None) -> Decision:
            naive = naive_norm(layout, self.norm_type)
            decision: Decision = super().clip(layout, stats)
            gradients = _whole(trainer, lambda p: p.grad)
            if self.info.needs_optimizer:
                # With ZeRO stage 1 a mode may change a gradient on the rank alone that steps it.
                for own in _from_all(_stepped_here(trainer)):
                    gradients |= {name: own[name] for name in own.keys() & gradients.keys()}
            ranks = _from_all((SideMetrics.of(decision), naive))
            if trainer.plugin.rank == 0:
                seen([rank[0] for rank in ranks], gradients, [rank[1] for rank in ranks])
            return decision

    # A mode with a ``clip`` of its own is never folded into the optimizer's step.
    mode.__class__ = Watched


def _stepped_here(trainer: Trainer) -> dict[str, Tensor]:
    """Return the gradients of whole parameters that this rank steps, if others step the rest."""
    stepped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    shards = trainer.optimizer.layout.shards
    mine = [shard for shard in shards if id(shard.param) in stepped]
    if len(mine) == len(shards):
        return {}
    return {
        shard.name: shard.param.grad.detach().cpu()
        for shard in mine
        if shard.param.grad is not None and not isinstance(shard.param, DTensor)
    }


def _whole(trainer: Trainer, value: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return a value of each parameter of the model; a collective."""
    return gathered(trainer.model.unwrap(), trainer.model.renamed, value)


def _from_all(mine: T) -> list[T]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _drifted(layout: Layout) -> list[str]:
    """Return the names of parameters whose replicas differ; a collective of one digest a shard."""
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, None] = {}
    for ranks in _from_all({_part(shard): _digest(shard.weight) for shard in layout.shards}):
        for part, digest in ranks.items():
            if first.setdefault(part, digest) != digest:
                found[part[0]] = None
    return list(found)


def _part(shard: ParamShard) -> tuple[Any, ...]:
    """Return the parameter's name and, for each mesh axis that shards it, the rank's index."""
    if not isinstance(shard.param, DTensor):
        return (shard.name,)
    at = shard.param.device_mesh.get_coordinate() or ()
    places = zip(at, shard.param.placements, strict=True)
    return (shard.name, *(index for index, place in places if not place.is_replicate()))


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _causes(
    config: RunConfig, one_process: Reference, reference: float, plugin: float
) -> Iterator[str]:
    """Yield reasons other than a fault of the plugin why the sides may differ."""
    yield "random numbers drawn in the forward pass, or as samples are read: ranks draw other ones"
    if any("BatchNorm" in type(module).__name__ for module in one_process.model.modules()):
        yield (
            "batch norm: SyncBatchNorm couples the samples of all ranks, and a pipeline fills a "
            "short microbatch up with copies (data.drop_last=true, and a data.batch_size that "
            "plugin.num_microbatches divides)"
        )
    if not relative(plugin, reference) <= config.verify.bound:
        yield (
            f"the losses of step 1 differ already ({plugin!r}, one process {reference!r}): "
            "look at the forward pass or the batches rather than at clipping"
        )
    if config.verify.dtype == "float32":
        yield "float32 rounds: verify.dtype=float64 tells rounding from a fault"


class _Losses(list[float]):
    def write(self, row: dict[str, Any]) -> None:
        self.append(float(row[keys.TRAIN_LOSS]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass
