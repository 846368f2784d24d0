"""The Booster stack: model, optimizer, criterion, dataloader and scheduler under a plugin."""

from runner.booster.booster import Booster
from runner.booster.nonfinite import LossScale, NonFiniteGradient, StepOrderError
from runner.booster.optimizer import OptimizerWrapper
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    Plugin,
    SinglePlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.booster.wrapper import ModelWrapper

__all__ = [
    "Booster",
    "HybridParallelPlugin",
    "LossScale",
    "LowLevelZeroPlugin",
    "ModelWrapper",
    "MoeHybridParallelPlugin",
    "NonFiniteGradient",
    "OptimizerWrapper",
    "PipelineParallelPlugin",
    "Plugin",
    "SinglePlugin",
    "StepOrderError",
    "TensorParallelPlugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
