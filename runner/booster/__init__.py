"""The Booster stack: model, optimizer, criterion, dataloader and scheduler under a plugin."""

from runner.booster.booster import Booster
from runner.booster.optimizer import NonFiniteGradient, OptimizerWrapper, StepOrderError
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
from runner.booster.precision import LossScale, ModelWrapper
from runner.booster.process_group import get_dist_logger, launch_from_torch
from runner.booster.schedule import CosineAnnealingLR, LinearWarmupCosineLR

__all__ = [
    "Booster",
    "CosineAnnealingLR",
    "HybridParallelPlugin",
    "LinearWarmupCosineLR",
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
    "get_dist_logger",
    "launch_from_torch",
]
