"""Small models trained for a few steps under any plugin, and what one process makes of the same."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner import Trainer
from runner.booster import LossScale, Plugin, SinglePlugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.clip import ClipMode, build
from runner.data.dataset import TensorPairs
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from runner.parallel.full_state_dict import gathered
from tests.distributed.training import Rows, images, network, tokens

BATCH = 12
"""Samples of one microbatch over all data parts."""

SHAPE = {"vocabulary": 17, "context": 12, "layers": 2, "heads": 4, "width": 12, "dropout": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(**SHAPE, tied=False, bias=True),
    "tied": lambda: GPT(**SHAPE, tied=True, bias=False),
    # Ranks share five experts unevenly.
    "moe": lambda: MixtureGPT(**SHAPE, tied=False, bias=True, experts=5, top_k=2),
    "moe_no_bias": lambda: MixtureGPT(**SHAPE, tied=False, bias=False, experts=5, top_k=2),
    "conv": lambda: network("images"),
}

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "static": lambda: TorchDDPPlugin(static_graph=True),
    "fsdp": TorchFSDPPlugin,
    "fsdp_gathered": lambda: TorchFSDPPlugin(reshard_after_forward=False),
    "hsdp": lambda: TorchFSDPPlugin(dp_replicate=2),
    "zero1": lambda: LowLevelZeroPlugin(stage=1),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "zero3": lambda: LowLevelZeroPlugin(stage=3),
    "tensor": TensorParallelPlugin,
    "tensor_dp": lambda: TensorParallelPlugin(tp_size=2),
    "sequence": lambda: TensorParallelPlugin(sequence_parallel=True),
    "gpipe": lambda: PipelineParallelPlugin(schedule="gpipe"),
    "1f1b": PipelineParallelPlugin,
    "pipeline_dp": lambda: PipelineParallelPlugin(pp_size=2),
    "interleaved": lambda: PipelineParallelPlugin(schedule="interleaved_1f1b"),
    "interleaved_dp": lambda: PipelineParallelPlugin(pp_size=2, schedule="interleaved_1f1b"),
    "zero_bubble": lambda: PipelineParallelPlugin(schedule="zero_bubble"),
    "zero_bubble_dp": lambda: PipelineParallelPlugin(pp_size=2, schedule="zero_bubble"),
    "moe": MoeHybridParallelPlugin,
    "moe_dp": lambda: MoeHybridParallelPlugin(ep_size=2),
    "moe_zero1": lambda: MoeHybridParallelPlugin(ep_size=2, zero_stage=1),
    "moe_zero3": lambda: MoeHybridParallelPlugin(ep_size=2, zero_stage=3),
    "hybrid": lambda: HybridParallelPlugin(tp_size=2, pp_size=2),
    "hybrid_zero1": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=1),
    "hybrid_zero2": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, zero_stage=2),
    "hybrid_fsdp_tp": lambda: HybridParallelPlugin(tp_size=2, zero_stage=3),
    "hybrid_fsdp_pp": lambda: HybridParallelPlugin(pp_size=2, zero_stage=2),
    "hybrid_ep_tp": lambda: HybridParallelPlugin(tp_size=2, ep_size=2),
    "hybrid_ep_pp": lambda: HybridParallelPlugin(pp_size=2, ep_size=2),
    "hybrid_ep_all": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, ep_size=2),
    "hybrid_sequence": lambda: HybridParallelPlugin(
        tp_size=2, pp_size=2, sequence_parallel=True, zero_stage=1
    ),
}

FAMILIES: dict[tuple[str, int], str] = {
    ("ddp", 2): "tied",
    ("fsdp", 2): "tied",
    ("hsdp", 4): "gpt",
    ("zero1", 2): "tied",
    ("zero2", 2): "gpt",
    ("zero3", 2): "tied",
    ("tensor", 2): "tied",
    ("sequence", 2): "gpt",
    ("1f1b", 2): "tied",
    ("interleaved", 2): "gpt",
    ("zero_bubble", 2): "tied",
    ("moe", 2): "moe",
    ("moe_zero3", 4): "moe",
    ("hybrid_zero1", 4): "tied",
    ("hybrid_fsdp_tp", 4): "gpt",
    ("hybrid_ep_pp", 4): "moe",
}
"""Of each kind of plugin one, with its ranks, and a model for it."""

MODES: dict[str, tuple[str, float | None, float]] = {
    "none": ("none", None, 2.0),
    "L2": ("norm", 0.05, 2.0),
    "L1": ("norm", 0.5, 1.0),
    "L3": ("norm", 0.02, 3.0),
    "inf": ("norm", 0.01, float("inf")),
    "value": ("value", 0.003, 2.0),
    "adaptive": ("adaptive", 0.02, 2.0),
}

_ADAGC = {"threshold": 1.2, "warmup_steps": 2, "absolute": 0.05, "beta": 0.8}
_ADAPTIVE = {"mode": "adaptive", "threshold": 0.02}

FURTHER_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "adagc": ("adagc", _ADAGC),
    "per_parameter": ("per_parameter", {"threshold": 0.02}),
    "blocks": ("per_parameter", {"threshold": 0.02, "by": "block", "norm_type": float("inf")}),
    "chain": ("chain", {"links": [{"mode": "adagc", **_ADAGC}, _ADAPTIVE, 0.02]}),
    # Some ranks of a pipeline have no shard of the first or of the last group.
    "groups": ("groups", {"groups": {"*.0.*": _ADAPTIVE, "*norm.weight": "none", "*": 0.01}}),
}
"""Modes with further options, which :mod:`tests.distributed.test_tensor_modes` trains by."""


@dataclass(frozen=True)
class Case:
    """One training: which model, how clipped, how many microbatches to a step, how many steps."""

    model: str
    mode: str
    accumulation: int = 1
    double: bool = True
    steps: int = 5
    precision: str = "fp32"
    rate: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


def _data(case: Case, samples: int) -> TensorPairs:
    data: TensorPairs = images(samples) if case.model == "conv" else tokens(samples)
    if data.inputs.is_floating_point():
        data.inputs = data.inputs.to(case.dtype)
    return data


def _mode(name: str) -> ClipMode:
    if name in FURTHER_MODES:
        kind, options = FURTHER_MODES[name]
        return build(kind, **options)
    kind, threshold, norm_type = MODES[name]
    return build(kind, threshold=threshold, norm_type=norm_type)


def trainer(
    case: Case,
    plugin: str | Plugin | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    **options: Any,
) -> Trainer:
    """Make a trainer of ``case`` under ``plugin``, or in one process.

    Args:
        case: model, clipping mode and accumulation to train.
        plugin: a name of :data:`PLUGINS`, a plugin, or None for one process.
        model: model to train instead of that of the case, which is initialised from seed 0.
        optimizer: makes an optimizer to use instead of plain SGD.
        options: further arguments of :class:`runner.Trainer`.
    """
    made = SinglePlugin() if plugin is None else plugin
    spread = PLUGINS[made]() if isinstance(made, str) else made
    # One sample over whole microbatches, so that the last one of an epoch is short and uneven.
    read, held_out = BATCH * case.accumulation * 2 + 1, BATCH + 1
    data, unseen = (_data(case, samples) for samples in (read, held_out))
    if model is None:
        torch.manual_seed(0)
        model = MODELS[case.model]().to(case.dtype)
    batch = BATCH // spread.data_size
    sgd = partial(torch.optim.SGD, lr=case.rate)
    scale = LossScale(scale=2.0**10) if case.precision == "fp16" else None
    return Trainer(
        model,
        spread.prepare_dataloader(data, batch, shuffle=True, seed=5),
        f"{case.steps}ba",
        eval_interval=f"{case.steps}ba",
        algorithms=_mode(case.mode),
        eval_dataloader=spread.prepare_dataloader(unseen, batch),
        optimizers=(optimizer or sgd)(model.parameters()),
        plugin=spread,
        accumulation_steps=case.accumulation,
        precision=case.precision,
        **{"loss_scale": scale} | options,
    )


def train(case: Case, plugin: str | None = None, **options: Any) -> dict[str, Any]:
    """Rows of every step; on the first rank the clipped gradients of the first and of the last step
    (those between show in their rows and in the weights), and the weights at the end.
    """
    rows = Rows()
    made = trainer(case, plugin, sinks=[rows], **options)
    model, renamed = made.model.unwrap(), made.model.renamed
    gradients: list[dict[str, torch.Tensor]] = []
    step = made.optimizer.step

    def keep() -> bool:
        if made.state.progress.step in (0, case.steps - 1):
            gradients.append(gathered(model, renamed, lambda p: p.grad))
        return step()

    made.optimizer.step = keep  # type: ignore[method-assign]
    made.fit()
    return {
        "rows": rows.rows,
        "weights": made.booster.state_dict(made.model),
        "gradients": gradients,
    }


@cache
def alone(case: Case) -> dict[str, Any]:
    """What one process makes of ``case``."""
    return train(case)


def train_all(plugin: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each of ``cases`` under ``plugin``, one after the other on the same ranks."""
    return [train(case, plugin) for case in cases]


EXACT = ("train/step", "train/samples", "train/tokens", "clip/clipped", "eval/accuracy")
CLOSE = ("train/loss", "grad/norm", "grad/norm_clipped", "clip/coef", "clip/fraction", "eval/loss")
TIMES = ("time/step_s", "throughput/samples_per_s")


def differences(ours: Sequence[dict[str, Any]], case: Case, rel: float) -> list[str]:
    """Describe where results of the ranks differ from one process; empty if nowhere.

    Args:
        ours: result of :func:`train` on each rank.
        case: the case that was trained.
        rel: largest relative error of a metric, and of a tensor by its L2 norm. In float64 the
            share that was clipped, a quotient of counts, must be equal bit for bit.
    """
    wanted = alone(case)
    exact = (*EXACT, "clip/fraction") if case.double else EXACT
    found: list[str] = []
    for rank, result in enumerate(ours):
        for row, expected in zip(result["rows"], wanted["rows"], strict=True):
            at = f"rank {rank} step {row['train/step']}"
            found += [f"{at}: {k}" for k in exact if row.get(k) != expected.get(k)]
            for key in CLOSE:
                a, b = row.get(key, 0.0), expected.get(key, 0.0)
                if not abs(a - b) <= rel * max(abs(b), 1e-30):
                    found.append(f"{at}: {key} {a!r} instead of {b!r}")
    found += uneven(ours)
    kept = sorted({1, case.steps})
    for step, got, expected in zip(kept, ours[0]["gradients"], wanted["gradients"], strict=True):
        found += unlike(f"gradient of step {step}", got, expected, rel)
    return found + unlike("weights", ours[0]["weights"], wanted["weights"], rel)


def uneven(ours: Sequence[dict[str, Any]]) -> list[str]:
    """Describe metrics of the rows that differ from those of the first rank."""
    return [
        f"rank {rank} step {row['train/step']}: {key} is not that of rank 0"
        for rank, result in enumerate(ours)
        for row, first in zip(result["rows"], ours[0]["rows"], strict=True)
        for key in row.keys() | first.keys()
        if key not in TIMES and repr(row.get(key)) != repr(first.get(key))
    ]


def unlike(
    what: str, got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rel: float
) -> list[str]:
    """Which tensors are not those wanted, each by the L2 norm of the difference."""
    if got.keys() != wanted.keys():
        return [f"{what}: {sorted(got.keys() ^ wanted.keys())} on one side alone"]
    largest = max(float(tensor.norm()) for tensor in wanted.values())
    found = []
    for name, tensor in wanted.items():
        # Some gradients are zero but for rounding (that of a key's bias): to the largest, then.
        size = max(float(tensor.norm()), 1e-3 * largest)
        off = float((got[name] - tensor).norm())
        if not off <= rel * size:
            found.append(f"{what}: {name} is off by {off / size:.1e}")
    return found
