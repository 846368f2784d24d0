"""A small network for tests that compare a loop of one's own under a plugin with plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from runner.booster import Plugin, SinglePlugin, TorchDDPPlugin, TorchFSDPPlugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
)

SAMPLES = 8
TP_PLAN = {"0": "colwise", "2": "rowwise"}
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "single": SinglePlugin,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(stage=1),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "zero3": lambda: LowLevelZeroPlugin(stage=3),
    "tensor": lambda: TensorParallelPlugin(tp_plan=TP_PLAN),
    "tensor_data": lambda: TensorParallelPlugin(tp_size=2, dp_size=2, tp_plan=TP_PLAN),
    "pipeline": PipelineParallelPlugin,
    "pipeline_data": lambda: PipelineParallelPlugin(pp_size=2, dp_size=2),
    "hybrid": lambda: HybridParallelPlugin(tp_size=2, pp_size=2, tp_plan=TP_PLAN),
}


def network(bias: bool = True) -> nn.Sequential:
    """Layers that can be split, cut into stages and sharded; the same weights each time."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, 4, bias), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(4, 3, bias)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs [8, 4] and targets [8, 3] of a step, larger with each step."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(SAMPLES, 7, dtype=torch.float64, generator=generator) * 3 * (step + 1)
    return drawn[:, :4], drawn[:, 4:]


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def clip(model: nn.Module, max_norm: float) -> float:
    """Limit the norm of all gradients of a whole model; torch's own adds 1e-6 to the norm."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / norm))
    return norm


def part(plugin: Plugin, whole: Tensor) -> Tensor:
    """The samples of a batch that this rank reads."""
    return whole.chunk(plugin.data_size)[plugin.data_rank]
