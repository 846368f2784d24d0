"""Clipping by the tools that people use, each by the call that it documents or makes itself.

A tool is a function of a model that returns what clips it, by mode: a function of the threshold and
the process groups of parameters that differ between ranks, which only ours takes.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runner.integrations.clipping import apply_gradient_clipping

Clip = Callable[[float, dict[str, Any]], Any]


def _torch(model: nn.Module) -> dict[str, Clip]:
    parameters = model.parameters
    return {
        "norm": lambda limit, _: nn.utils.clip_grad_norm_(parameters(), limit),
        "value": lambda limit, _: nn.utils.clip_grad_value_(parameters(), limit),
    }


@cache
def _accelerator() -> Any:
    from accelerate import Accelerator

    describe_ranks()
    return Accelerator(cpu=True)


def _accelerate(model: nn.Module) -> dict[str, Clip]:
    accelerator = _accelerator()
    return {
        "norm": lambda limit, _: accelerator.clip_grad_norm_(model.parameters(), limit),
        "value": lambda limit, _: accelerator.clip_grad_value_(model.parameters(), limit),
    }


def _fabric(model: nn.Module) -> dict[str, Clip]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "norm": lambda limit, _: fabric.clip_gradients(model, optimizer, max_norm=limit),
        "value": lambda limit, _: fabric.clip_gradients(model, optimizer, clip_val=limit),
    }


def _lightning(model: nn.Module) -> dict[str, Clip]:
    from lightning.pytorch.plugins.precision import Precision

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision()
    return {
        "norm": lambda limit, _: precision.clip_grad_by_norm(optimizer, limit),
        "value": lambda limit, _: precision.clip_grad_by_value(optimizer, limit),
    }


@cache
def _trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    describe_ranks()
    # Nothing is written there.
    arguments = TrainingArguments(tempfile.gettempdir(), use_cpu=True, report_to="none")
    return Trainer(nn.Linear(1, 1), arguments)


def _transformers(model: nn.Module) -> dict[str, Clip]:
    trainer = _trainer()

    def clip(limit: float, _: dict[str, Any]) -> Any:
        trainer.args.max_grad_norm = limit
        trainer._mixed_mesh_grads = None  # what it remembers of another model
        return trainer._clip_grad_norm(model)

    return {"norm": clip}


def _timm(model: nn.Module) -> dict[str, Clip]:
    from timm.utils.clip_grad import dispatch_clip_grad

    def clip(mode: str) -> Clip:
        return lambda limit, _: dispatch_clip_grad(model.parameters(), limit, mode=mode)

    return {"norm": clip("norm"), "value": clip("value"), "adaptive": clip("agc")}


def _ours(model: nn.Module) -> dict[str, Clip]:
    def clip(mode: str, **options: Any) -> Clip:
        return lambda limit, groups: (
            apply_gradient_clipping(model, mode, limit, groups=groups or None, **options).norm
        )

    return {"norm": clip("norm"), "value": clip("value"), "adaptive": clip("adaptive", exclude=[])}


def _torchtitan(model: nn.Module) -> dict[str, Clip]:
    from torchtitan.distributed.utils import clip_grad_norm_

    def clip(limit: float, groups: dict[str, Any]) -> Any:
        return clip_grad_norm_(list(model.parameters()), limit, pp_mesh=_mesh_of_stages(groups))

    return {"norm": clip}


def _mesh_of_stages(groups: dict[str, Any]) -> Any:
    """Return the mesh of pipeline stages that the layout has, None without any."""
    stages = groups.get("stage.*")
    return None if stages is None else DeviceMesh.from_group(stages, "cpu", mesh_dim_names=("pp",))


def _automodel(model: nn.Module) -> dict[str, Clip]:
    from nemo_automodel.components.training.utils import clip_grad_norm

    def clip(limit: float, groups: dict[str, Any]) -> Any:
        mesh = _mesh_of_stages(groups)
        return clip_grad_norm(
            limit, [model], pp_enabled=mesh is not None, device_mesh=mesh, pp_axis_name="pp"
        )

    return {"norm": clip}


def _deepspeed(model: nn.Module) -> dict[str, Clip]:
    import deepspeed
    from deepspeed.runtime.utils import clip_grad_norm_

    deepspeed.init_distributed("gloo", verbose=False)
    return {"norm": lambda limit, _: clip_grad_norm_(list(model.parameters()), limit)}


def _megatron(model: nn.Module) -> dict[str, Clip]:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

    def clip(limit: float, _: dict[str, Any]) -> Any:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = get_grad_norm_fp32([parameter.grad for parameter in parameters], 2.0)
        clip_grad_by_total_norm_fp32(parameters, limit, norm)
        return norm

    return {"norm": clip}


def _composer(model: nn.Module) -> dict[str, Clip]:
    from composer.algorithms.gradient_clipping import apply_gradient_clipping as composers

    def clip(kind: str) -> Clip:
        return lambda limit, _: composers(model, kind, limit, fsdp_enabled=False)

    return {"norm": clip("norm"), "value": clip("value"), "adaptive": clip("adaptive")}


def _olmo(model: nn.Module) -> dict[str, Clip]:
    from olmo_core.train.train_module import TransformerTrainModule

    module = SimpleNamespace(model=model)  # all that its method reads
    clip: Any = TransformerTrainModule._clip_grad_norm
    return {"norm": lambda limit, _: clip(module, limit)}


def _colossalai(model: nn.Module) -> dict[str, Clip]:
    from colossalai.interface import OptimizerWrapper

    optimizer = OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    return {
        "norm": lambda limit, _: optimizer.clip_grad_by_norm(limit),
        "value": lambda limit, _: optimizer.clip_grad_by_value(limit),
    }


Calls = Callable[[nn.Module], dict[str, Clip]]
TOOLS: dict[str, tuple[str, Calls]] = {
    "torch": ("torch", _torch),
    "Accelerate": ("accelerate", _accelerate),
    "Fabric": ("lightning", _fabric),
    "Lightning": ("lightning", _lightning),
    "transformers": ("transformers", _transformers),
    "timm": ("timm", _timm),
    "clip-runner": ("clip-runner", _ours),
}
"""For each tool its package, and what clips a model."""


OTHERS: dict[str, Calls] = {
    "torchtitan": _torchtitan,
    "megatron-core": _megatron,
    "deepspeed": _deepspeed,
    "colossalai": _colossalai,
    "mosaicml": _composer,
    "ai2-olmo-core": _olmo,
    "nemo-automodel": _automodel,
}
"""Tools that are measured on request, each in an environment of its own: package and calls."""


@cache
def installed() -> dict[str, str]:
    """Return the tools that can be measured in this environment, with their versions."""
    names = {}
    for tool, (package, _) in TOOLS.items():
        module = "runner" if package == "clip-runner" else package
        if find_spec(module) is not None:
            names[tool] = version(package)
    return names


@cache
def versions() -> dict[str, str]:
    """Return the versions of all tools of this environment."""
    names = dict(installed())
    for package in OTHERS:
        with suppress(PackageNotFoundError):
            names[package] = version(package)
    return names


def clips_of(tool: str, model: nn.Module) -> dict[str, Clip]:
    """Return what a tool clips a model by."""
    calls = OTHERS[tool] if tool in OTHERS else TOOLS[tool][1]
    with warnings.catch_warnings(action="ignore"):  # of libraries, about missing arguments
        return calls(model)


def describe_ranks() -> None:
    """Describe this rank by the variables of torchrun, which other libraries read."""
    rank = str(dist.get_rank())
    world = str(dist.get_world_size())
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody connects: the process group exists
    }
