"""Plugins, which distribute a model over ranks, by their names in a configuration."""

from runner.booster.plugin.base import Plugin, SinglePlugin
from runner.booster.plugin.hybrid import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.parallel.distribution import ParallelModel
from runner.parallel.mesh import MeshSizes, SizeError
from runner.parallel.stages import SCHEDULES

PLUGINS: dict[str, type[Plugin]] = {
    "single": SinglePlugin,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": LowLevelZeroPlugin,
    "tensor": TensorParallelPlugin,
    "pipeline": PipelineParallelPlugin,
    "moe": MoeHybridParallelPlugin,
    "hybrid": HybridParallelPlugin,
}
"""The plugin of each option of ``conf/plugin``."""

__all__ = ["PLUGINS", "SCHEDULES", "MeshSizes", "ParallelModel", "Plugin", "SinglePlugin"]
__all__ += ["HybridParallelPlugin", "LowLevelZeroPlugin", "MoeHybridParallelPlugin"]
__all__ += ["PipelineParallelPlugin", "SizeError", "TensorParallelPlugin", "TorchDDPPlugin"]
__all__ += ["TorchFSDPPlugin"]
