"""Small models trained for a few steps under any plugin, and what one process makes of the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from runner import Trainer
from runner.booster import LossScale, Plugin, SinglePlugin
from runner.booster.parallel.gathering import gathered
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.clip import build
from runner.data.dataset import TensorPairs
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from tests.distributed.training import Rows, images, network, tokens

BATCH = 12
"""Samples of one microbatch over all data parts."""

SHAPE = {"vocabulary": 17, "context": 12, "layers": 2, "heads": 4, "width": 12, "dropout": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(**SHAPE, tied=False, bias=True),
    "tied": lambda: GPT(**SHAPE, tied=True, bias=False),
    "moe": lambda: MixtureGPT(**SHAPE, tied=False, bias=True, experts=5, top_k=2),
    "conv": lambda: network("images"),
}

PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
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
    "zero_bubble": lambda: PipelineParallelPlugin(schedule="zero_bubble"),
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

MODES: dict[str, tuple[str, float | None, float]] = {
    "none": ("none", None, 2.0),
    "L2": ("norm", 0.05, 2.0),
    "L1": ("norm", 0.5, 1.0),
    "L3": ("norm", 0.02, 3.0),
    "inf": ("norm", 0.01, float("inf")),
    "value": ("value", 0.003, 2.0),
    "adaptive": ("adaptive", 0.02, 2.0),
}


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


def train(case: Case, plugin: str | None = None) -> dict[str, Any]:
    """Rows of every step; on the first rank the clipped gradients of the first and of the last step
    (those between show in their rows and in the weights), and the weights at the end.
    """
    spread = SinglePlugin() if plugin is None else PLUGINS[plugin]()
    # One sample over whole microbatches, so that the last one of an epoch is short and uneven.
    samples = BATCH * case.accumulation * 2 + 1
    data: TensorPairs = images(samples) if case.model == "conv" else tokens(samples)
    if data.inputs.is_floating_point():
        data.inputs = data.inputs.to(case.dtype)
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    name, threshold, norm_type = MODES[case.mode]
    rows = Rows()
    batch = BATCH // spread.data_size
    trainer = Trainer(
        model,
        spread.prepare_dataloader(data, batch, shuffle=True, seed=5),
        f"{case.steps}ba",
        eval_interval=f"{case.steps}ba",
        algorithms=build(name, threshold=threshold, norm_type=norm_type),
        eval_dataloader=spread.prepare_dataloader(data, batch),
        optimizers=torch.optim.SGD(model.parameters(), lr=case.rate),
        plugin=spread,
        accumulation_steps=case.accumulation,
        precision=case.precision,
        loss_scale=LossScale(scale=2.0**10) if case.precision == "fp16" else None,
        sinks=[rows],
    )
    gradients: list[dict[str, torch.Tensor]] = []
    step = trainer.optimizer.step
    renamed = trainer.booster.renamed

    def keep() -> bool:
        if trainer.progress.step in (0, case.steps - 1):
            gradients.append(gathered(model, renamed, lambda p: p.grad))
        return step()

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    trainer.fit()
    return {
        "rows": rows.rows,
        "weights": trainer.booster.state_dict(trainer.model),
        "gradients": gradients,
    }


@cache
def alone(case: Case) -> dict[str, Any]:
    """What one process makes of ``case``."""
    torch.set_num_threads(1)
    return train(case)


def train_all(plugin: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Each of ``cases`` under ``plugin``, one after the other on the same ranks."""
    return [train(case, plugin) for case in cases]


EXACT = ("train/step", "train/samples", "train/tokens", "clip/clipped", "eval/accuracy")
CLOSE = ("train/loss", "grad/norm", "grad/norm_clipped", "clip/coef", "clip/fraction", "eval/loss")
TIMES = ("time/step_s", "throughput/samples_per_s")


def differences(ours: Sequence[dict[str, Any]], case: Case, rel: float) -> list[str]:
    """Where the ranks' results are not those of one process; empty if all is well."""
    wanted = alone(case)
    found: list[str] = []
    for rank, result in enumerate(ours):
        for row, expected in zip(result["rows"], wanted["rows"], strict=True):
            at = f"rank {rank} step {row['train/step']}"
            found += [f"{at}: {k}" for k in EXACT if row.get(k) != expected.get(k)]
            for key in CLOSE:
                a, b = row.get(key, 0.0), expected.get(key, 0.0)
                if not abs(a - b) <= rel * max(abs(b), 1e-30):
                    found.append(f"{at}: {key} {a!r} instead of {b!r}")
        # Every rank has the same bits.
        for row, first in zip(result["rows"], ours[0]["rows"], strict=True):
            found += [
                f"rank {rank}: {key} is not that of rank 0"
                for key in row
                if key not in TIMES and row[key] != first[key]
            ]
    kept = sorted({1, case.steps})
    for step, got, expected in zip(kept, ours[0]["gradients"], wanted["gradients"], strict=True):
        found += _unlike(f"gradient of step {step}", got, expected, rel)
    return found + _unlike("weights", ours[0]["weights"], wanted["weights"], rel)


def _unlike(
    what: str, got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rel: float
) -> list[str]:
    if got.keys() != wanted.keys():
        return [f"{what}: {sorted(got.keys() ^ wanted.keys())} on one side alone"]
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    found = []
    for name, tensor in wanted.items():
        # Some gradients are zero but for rounding (that of a key's bias): to the largest, then.
        size = max(float(tensor.abs().max()), 1e-3 * largest)
        off = float((got[name] - tensor).abs().max())
        if not off <= rel * size:
            found.append(f"{what}: {name} is off by {off / size:.1e}")
    return found
