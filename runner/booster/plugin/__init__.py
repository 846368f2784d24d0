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

__all__ = ["PLUGINS", "MeshSizes", "ParallelModel", "Plugin", "SinglePlugin", "SizeError"]
__all__ += ["HybridParallelPlugin", "LowLevelZeroPlugin", "MoeHybridParallelPlugin"]
__all__ += ["PipelineParallelPlugin", "TensorParallelPlugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
