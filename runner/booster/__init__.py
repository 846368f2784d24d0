"""The Booster stack: model, optimizer, criterion, dataloader and scheduler under a plugin."""

from runner.booster.booster import Booster
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
from runner.booster.step_order import LossScale, NonFiniteGradient, StepOrderError
from runner.booster.wrapper import ModelWrapper

__all__ = ["Booster", "LossScale", "ModelWrapper", "NonFiniteGradient", "OptimizerWrapper"]
__all__ += ["HybridParallelPlugin", "LowLevelZeroPlugin", "MoeHybridParallelPlugin", "Plugin"]
__all__ += ["PipelineParallelPlugin", "SinglePlugin", "StepOrderError", "TensorParallelPlugin"]
__all__ += ["TorchDDPPlugin", "TorchFSDPPlugin"]
