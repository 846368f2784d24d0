"""Choose and apply gradient clipping and gradient accumulation.

The command is ``python -m runner``; the library is what this module exports. Names are resolved on
first use, so that importing ``runner`` (which every ``--help`` and every refused request does) does
not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.booster import (
        Booster,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        MoeHybridParallelPlugin,
        PipelineParallelPlugin,
        TensorParallelPlugin,
        TorchDDPPlugin,
        TorchFSDPPlugin,
    )
    from runner.booster.loss import Loss
    from runner.check import check_accumulation, check_clipping
    from runner.checkpoint.content import CheckpointSaver
    from runner.clip import SkipRule
    from runner.integrations.clipping import (
        apply_gradient_clipping,
        clipping_state_dict,
        load_clipping_state_dict,
    )
    from runner.integrations.lightning_callback import LightningClipping
    from runner.integrations.monitor import GradientMonitor
    from runner.integrations.transformers_callback import ClippingCallback
    from runner.launch.process_group import (
        DistCoordinator,
        get_current_device,
        get_dist_logger,
        launch_from_torch,
    )
    from runner.models import Classifier
    from runner.optim.schedulers import CosineAnnealingLR, LinearWarmupLR
    from runner.train.callbacks import SkippedSteps
    from runner.train.options import Evaluate, GradientClipping, InBackward, Log, Measurements
    from runner.train.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Booster": "runner.booster",
    "CheckpointSaver": "runner.checkpoint.content",
    "Classifier": "runner.models",
    "ClippingCallback": "runner.integrations.transformers_callback",
    "CosineAnnealingLR": "runner.optim.schedulers",
    "DistCoordinator": "runner.launch.process_group",
    "Evaluate": "runner.train.options",
    "GradientClipping": "runner.train.options",
    "GradientMonitor": "runner.integrations.monitor",
    "HybridParallelPlugin": "runner.booster",
    "LightningClipping": "runner.integrations.lightning_callback",
    "LinearWarmupLR": "runner.optim.schedulers",
    "InBackward": "runner.train.options",
    "Log": "runner.train.options",
    "Loss": "runner.booster.loss",
    "LowLevelZeroPlugin": "runner.booster",
    "Measurements": "runner.train.options",
    "MoeHybridParallelPlugin": "runner.booster",
    "PipelineParallelPlugin": "runner.booster",
    "SkipRule": "runner.clip",
    "SkippedSteps": "runner.train.callbacks",
    "TensorParallelPlugin": "runner.booster",
    "TorchDDPPlugin": "runner.booster",
    "TorchFSDPPlugin": "runner.booster",
    "Trainer": "runner.train.trainer",
    "apply_gradient_clipping": "runner.integrations.clipping",
    "check_accumulation": "runner.check",
    "check_clipping": "runner.check",
    "clipping_state_dict": "runner.integrations.clipping",
    "get_current_device": "runner.launch.process_group",
    "get_dist_logger": "runner.launch.process_group",
    "launch_from_torch": "runner.launch.process_group",
    "load_clipping_state_dict": "runner.integrations.clipping",
}

__all__ = [
    "Booster",
    "CheckpointSaver",
    "Classifier",
    "ClippingCallback",
    "CosineAnnealingLR",
    "DistCoordinator",
    "Evaluate",
    "GradientClipping",
    "GradientMonitor",
    "HybridParallelPlugin",
    "InBackward",
    "LightningClipping",
    "LinearWarmupLR",
    "Log",
    "Loss",
    "LowLevelZeroPlugin",
    "Measurements",
    "MoeHybridParallelPlugin",
    "PipelineParallelPlugin",
    "SkipRule",
    "SkippedSteps",
    "TensorParallelPlugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "Trainer",
    "apply_gradient_clipping",
    "check_accumulation",
    "check_clipping",
    "clipping_state_dict",
    "get_current_device",
    "get_dist_logger",
    "launch_from_torch",
    "load_clipping_state_dict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
