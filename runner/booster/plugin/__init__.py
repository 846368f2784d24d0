"""Plugins, which distribute a model over ranks: one module each."""

from runner.booster.plugin.base import ParallelModel, Plugin
from runner.booster.plugin.ddp import TorchDDPPlugin
from runner.booster.plugin.fsdp import TorchFSDPPlugin
from runner.booster.plugin.hybrid import HybridParallelPlugin
from runner.booster.plugin.moe import MoeHybridParallelPlugin
from runner.booster.plugin.pipeline import PipelineParallelPlugin
from runner.booster.plugin.single import SinglePlugin
from runner.booster.plugin.tensor import TensorParallelPlugin
from runner.booster.plugin.zero import LowLevelZeroPlugin

__all__ = [
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "ParallelModel",
    "PipelineParallelPlugin",
    "Plugin",
    "SinglePlugin",
    "TensorParallelPlugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
