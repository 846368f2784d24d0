"""Clipping by the tools that people use, each by the call that it documents or makes itself.

A tool is a function of a model that returns what clips it, by mode: a function of the threshold and
the process groups of parameters that differ between ranks, which only ours takes.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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


TOOLS: dict[str, tuple[str, Callable[[nn.Module], dict[str, Clip]]]] = {
    "torch": ("torch", _torch),
    "Accelerate": ("accelerate", _accelerate),
    "Fabric": ("lightning", _fabric),
    "Lightning": ("lightning", _lightning),
    "transformers": ("transformers", _transformers),
    "timm": ("timm", _timm),
    "clip-runner": ("clip-runner", _ours),
}
"""For each tool its package, and what clips a model."""


@cache
def installed() -> dict[str, str]:
    """Return the tools that can be measured here, with their versions."""
    names = {}
    for tool, (package, _) in TOOLS.items():
        module = "runner" if package == "clip-runner" else package
        if find_spec(module) is not None:
            names[tool] = version(package)
    return names


def clips_of(tool: str, model: nn.Module) -> dict[str, Clip]:
    """Return what a tool clips a model by."""
    with warnings.catch_warnings(action="ignore"):  # of libraries, about missing arguments
        return TOOLS[tool][1](model)


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
