"""The work of one rank in a verification: both sides step by step, one mode after another.

The plugin's side is the training loop of a run, with a hook before and after clipping.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.booster import Booster, NonFiniteGradient
from runner.booster.loss import Loss
from runner.clip import ClipMode, Decision
from runner.config.notation import Duration
from runner.config.schema import RunConfig
from runner.gradients import Layout
from runner.parallel.collectives import from_all, full
from runner.parallel.full_state_dict import gathered
from runner.run_folder import keys
from runner.telemetry.sinks import Sink
from runner.train import build
from runner.train.options import Log
from runner.train.trainer import Trainer
from runner.verify.comparison import (
    Naive,
    compare_mode,
    compare_step,
    naive_norm,
    outcome,
    relative,
    side_of,
    tensor_errors,
    worst_naive,
)
from runner.verify.reference import Reference, collate_for, make_mode, make_parts, make_samples

BINDS = 0.1  # a derived threshold ÷ the largest value of the first step that is compared with it


def execute(config: RunConfig, sinks: Sequence[Sink] = ()) -> dict[str, Any]:
    """Compare the plugin with one process in each mode of ``verify.modes``."""
    if build.device_of(config.device).type == "cuda" and config.verify.dtype == "float32":
        # cuDNN uses TF32 by default, which has ten bits of mantissa.
        torch.backends.cudnn.allow_tf32 = False
    # torch warns of slow redistribution: speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plugin = config.plugin.model_copy(update={"param_dtype": None})
    config = config.model_copy(update={"plugin": plugin})
    causes: list[str] = []
    try:
        modes = config.verify.modes or [config.clip.mode]
        results = [_compare(config, name, causes) for name in modes]
    except NonFiniteGradient as error:
        error.advice = "a verification compares every step, whatever clip.nonfinite is"
        raise
    except RuntimeError as error:
        if config.verify.dtype == "float64" and "dtype" in str(error):
            error.add_note("if the model computes in float32 only, use verify.dtype=float32")
        raise
    results_of_first_rank = [result for result in results if result is not None]
    if not results_of_first_rank:
        return {}
    rate = config.verify.lr
    note = (
        f"both sides step by plain SGD at a rate of {rate:g} (modes that need the optimizer: AdamW "
        f"at {rate / 10:g}), in {config.verify.dtype} and without dropout: adaptive steps hide a "
        "gradient of the wrong scale"
    )
    return outcome(results_of_first_rank, [note], causes, config.verify.bound)


def _compare(config: RunConfig, name: str, causes: list[str]) -> dict[str, Any] | None:
    """Train both sides in one clipping mode; only the first rank has a result."""
    bound = config.verify.bound
    plugin = build.make_plugin(config)
    mode, derived = make_mode(config, name)
    data = make_samples(config, plugin.data_size)
    losses = _Losses()
    model, criterion, optimizer = make_parts(config, mode)
    build.change_passes(model, config)  # of this side alone: the reference is plain PyTorch
    loader = plugin.prepare_dataloader(
        data,
        batch_size=config.data.batch_size,
        shuffle=True,
        drop_last=config.data.drop_last,
        seed=config.seed,
        collate_fn=collate_for(config),
    )
    trainer = Trainer(
        model,
        loader,
        Duration(config.verify.steps, "ba"),
        algorithms=mode,
        optimizers=optimizer,
        criterion=Loss(criterion, config.loss.items),
        booster=Booster(plugin=plugin, nonfinite="error"),
        accumulation_steps=config.accumulation.phases,
        log=Log([] if plugin.rank else [losses], bar=False),
    )
    pipeline = trainer.model.pipeline
    chunks = 1 if pipeline is None else pipeline.microbatches

    def one_process() -> Reference:
        again, _ = make_mode(config, name)  # a mode is bound to one layout
        again.threshold = mode.threshold
        return Reference(config, again, plugin.data_size, data, chunks)

    if derived:
        peak = math.nan if plugin.rank else one_process().peak()
        mode.threshold = from_all(peak)[0] * BINDS
    reference = None if plugin.rank else one_process()
    steps: list[dict[str, Any]] = []

    def seen(
        ranks: list[dict[str, float]], gradients: dict[str, Tensor], naive: list[Naive | None]
    ) -> None:
        assert reference is not None
        metrics, loss, expected = reference.step()
        remembers = mode.info.needs_optimizer or _remembers(reference.mode.state_dict())
        step = compare_step(
            len(steps) + 1, ranks, gradients, metrics, expected, bound, history=remembers
        )
        step["naive"] = worst_naive(naive, metrics["norm"])
        step["loss"] = {"reference": loss}
        steps.append(step)

    _watch(trainer, seen)
    trainer.fit()
    drifted = _drifted(trainer.optimizer.layout)
    weights = _whole(trainer, lambda p: p)
    if reference is None:
        return None
    expected = {name: p.detach().cpu() for name, p in reference.model.named_parameters()}
    errors = tensor_errors({name: weights[name] for name in weights.keys() & expected}, expected)
    for step, loss in zip(steps, losses, strict=True):
        step["loss"]["plugin"] = loss
    causes += _causes(config, reference, **steps[0]["loss"])
    about = {"mode": name, "threshold": mode.threshold, "derived": derived}
    return about | compare_mode(steps, errors, drifted, bound)


def _remembers(state: Mapping[str, Any]) -> bool:
    """Return whether a mode, or one inside of it, remembers earlier steps."""
    if "memory" in state:
        return True
    return any(_remembers(inner) for inner in state.values() if isinstance(inner, Mapping))


def _watch(trainer: Trainer, seen: Callable[..., None]) -> None:
    """Call ``seen`` on the first rank with each step's metrics, gradients and naive norms."""

    optimizer = trainer.optimizer
    clip = optimizer.clip

    def watched(mode: ClipMode, fold: bool = False, each: bool = False) -> Decision:
        optimizer.begin_clip()  # gradients are final from here on
        naive = naive_norm(optimizer.layout, mode.norm_type)
        decision: Decision = clip(mode, fold=False, each=each)
        gradients = _whole(trainer, lambda p: p.grad)
        if mode.info.needs_optimizer:
            # With ZeRO stage 1 a mode may change a gradient on the rank alone that steps it.
            for stepped in from_all(_stepped_on_rank(trainer)):
                gradients |= {name: stepped[name] for name in stepped.keys() & gradients.keys()}
        ranks = from_all((side_of(decision), naive))
        if trainer.plugin.rank == 0:
            seen([rank[0] for rank in ranks], gradients, [rank[1] for rank in ranks])
        return decision

    optimizer.clip = watched


def _stepped_on_rank(trainer: Trainer) -> dict[str, Tensor]:
    """Return the whole gradients that this rank steps, if other ranks step some too."""
    stepped = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    shards = trainer.optimizer.layout.shards
    mine = [shard for shard in shards if id(shard.param) in stepped]
    if len(mine) == len(shards):
        return {}
    return {
        shard.name: full(shard.param.grad).detach().cpu()
        for shard in mine
        if shard.param.grad is not None
    }


def _whole(trainer: Trainer, value: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return a value of each parameter of the model; a collective."""
    return gathered(trainer.model.unwrap(), trainer.model.renamed, value)


def _drifted(layout: Layout) -> list[str]:
    """Return the names of parameters whose replicas differ; a collective of one digest a shard."""
    digest_of: dict[tuple[Any, ...], str] = {}  # by name, and position along axes that split
    for shard in layout.shards:
        part: tuple[Any, ...] = (shard.name,)
        parameter = shard.param
        if isinstance(parameter, DTensor):
            position = parameter.device_mesh.get_coordinate() or ()
            for index, placement in zip(position, parameter.placements, strict=True):
                if not placement.is_replicate():
                    part += (index,)
        flat = shard.weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest_of[part] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    digests: dict[tuple[Any, ...], set[str]] = {}
    for digests_of_rank in from_all(digest_of):
        for part, digest in digests_of_rank.items():
            digests.setdefault(part, set()).add(digest)
    differing = [part[0] for part, different in digests.items() if len(different) > 1]
    return list(dict.fromkeys(differing))


def _causes(
    config: RunConfig, one_process: Reference, reference: float, plugin: float
) -> Iterator[str]:
    """Yield reasons other than a fault of the plugin why the sides may differ."""
    yield "random numbers drawn in the forward pass, or as samples are read: ranks draw other ones"
    if any("BatchNorm" in type(module).__name__ for module in one_process.model.modules()):
        yield "batch norm: SyncBatchNorm couples ranks, a pipeline copies samples of short batches"
    if not relative(plugin, reference) <= config.verify.bound:
        differ = f"the losses of step 1 differ already ({plugin!r}, one process {reference!r})"
        yield f"{differ}: look at the forward pass or the batches rather than at clipping"


class _Losses(list[float]):
    def write(self, row: dict[str, Any]) -> None:
        self.append(float(row[keys.TRAIN_LOSS]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass
