"""What other libraries do in place of this project, each as its documentation shows it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from runner.bench.pairs import Side, clocked

if TYPE_CHECKING:
    from runner.bench.loop import Task

PEERS = ("timm", "lightning", "accelerate")
"""Packages that are measured with ``--peers``."""


def versions() -> dict[str, str]:
    """Return the version of each package of :data:`PEERS` that is installed."""
    return {name: version(name) for name in PEERS if find_spec(name)}


def timm_adaptive(parameters: list[nn.Parameter], factor: float) -> Callable[[], object] | None:
    """Return timm's adaptive clipping of parameters; None where timm is not installed."""
    if not find_spec("timm"):
        return None
    from timm.utils.agc import adaptive_clip_grad

    clip: Callable[..., object] = adaptive_clip_grad
    return lambda: clip(parameters, clip_factor=factor, eps=1e-3)


def loops(task: Task, threshold: float) -> dict[str, Side]:
    """Return the training loop of each library that is installed, which clips by the norm."""
    known: dict[str, tuple[str, Callable[[Task, float], float]]] = {
        "Lightning Fabric": ("lightning", _fabric),
        "Lightning Trainer": ("lightning", _lightning),
        "Accelerate": ("accelerate", _accelerate),
    }

    def timed(train: Callable[[Task, float], float]) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about what they were not given
            return train(task, threshold)

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


def _fabric(task: Task, threshold: float) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    network, plain, own = task.parts()
    model, optimizer = fabric.setup(network, own)
    clip = partial(fabric.clip_gradients, model, optimizer, max_norm=threshold)
    loader = fabric.setup_dataloaders(plain)
    return plain_loop(model, loader, optimizer, fabric.backward, clip)


def _accelerate(task: Task, threshold: float) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader, optimizer = accelerator.prepare(*task.parts())
    return plain_loop(
        model,
        loader,
        optimizer,
        accelerator.backward,
        lambda: accelerator.clip_grad_norm_(model.parameters(), threshold),
    )


def _lightning(task: Task, threshold: float) -> float:
    import lightning

    # It has set its own level when it was imported, and prints between the rows.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    network, loader, optimizer = task.parts()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, number: int) -> Any:
            inputs, targets = batch
            return F.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=task.steps,
        gradient_clip_val=threshold,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return clocked(lambda: trainer.fit(Module(), loader))
