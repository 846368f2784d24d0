"""What other libraries do in place of this project, each as its documentation shows it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from runner.bench.timing import Side

Parts = Callable[[], tuple[nn.Module, DataLoader[Any], Optimizer]]
"""Makes a network, its loader and its optimizer."""


def timm_adaptive(parameters: list[nn.Parameter], factor: float) -> Callable[[], object] | None:
    """Return timm's adaptive clipping of parameters; None where timm is not installed."""
    if not find_spec("timm"):
        return None
    from timm.utils.agc import adaptive_clip_grad

    clip: Callable[..., object] = adaptive_clip_grad
    return lambda: clip(parameters, clip_factor=factor, eps=1e-3)


def loops(parts: Parts, threshold: float) -> dict[str, Side]:
    """Return the training loop of each library that is installed, which clips by the norm."""
    known: dict[str, tuple[str, Side]] = {
        "Lightning Fabric": ("lightning", partial(_fabric, parts, threshold)),
        "Accelerate": ("accelerate", partial(_accelerate, parts, threshold)),
    }

    def timed(train: Side) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about what they were not given
            return train()

    return {name: partial(timed, train) for name, (each, train) in known.items() if find_spec(each)}


def plain_loop(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer,
    backward: Callable[[Tensor], object],
    clip: Callable[[], object],
) -> float:
    """Train for an epoch in plain PyTorch; return the seconds."""
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for inputs, targets in loader:
        backward(criterion(model(inputs), targets))
        clip()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def _fabric(parts: Parts, threshold: float) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    network, plain, own = parts()
    model, optimizer = fabric.setup(network, own)
    clip = partial(fabric.clip_gradients, model, optimizer, max_norm=threshold)
    loader = fabric.setup_dataloaders(plain)
    return plain_loop(model, loader, optimizer, fabric.backward, clip)


def _accelerate(parts: Parts, threshold: float) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader, optimizer = accelerator.prepare(*parts())
    clip = partial(accelerator.clip_grad_norm_, list(model.parameters()), threshold)
    return plain_loop(model, loader, optimizer, accelerator.backward, clip)
