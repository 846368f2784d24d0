"""The loop of :mod:`runner.bench.loop` in other libraries, each as its documentation shows it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional as F

from runner.bench.pairs import Side

if TYPE_CHECKING:
    from runner.bench.loop import Task


def loops(task: Task, threshold: float) -> dict[str, Side]:
    """Return the loop of each library that is installed.

    Args:
        task: what to train.
        threshold: threshold of the norm.
    """
    known: dict[str, tuple[str, Callable[[Task, float], float]]] = {
        "Lightning Fabric": ("lightning", _fabric),
        "Lightning Trainer": ("lightning", _lightning),
        "Accelerate": ("accelerate", _accelerate),
        "Composer": ("composer", _composer),
    }

    def side(train: Callable[[Task, float], float]) -> Side:
        def timed() -> float:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries, about what they were not given
                return train(task, threshold)

        return timed

    return {name: side(train) for name, (module, train) in known.items() if find_spec(module)}


def _fabric(task: Task, threshold: float) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    network, plain_loader, plain_optimizer = task.parts()
    model, optimizer = fabric.setup(network, plain_optimizer)
    loader = fabric.setup_dataloaders(plain_loader)
    started = time.perf_counter()
    for inputs, targets in loader:
        fabric.backward(F.cross_entropy(model(inputs), targets))
        fabric.clip_gradients(model, optimizer, max_norm=threshold)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def _accelerate(task: Task, threshold: float) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader, optimizer = accelerator.prepare(*task.parts())
    started = time.perf_counter()
    for inputs, targets in loader:
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), threshold)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


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
    started = time.perf_counter()
    trainer.fit(Module(), loader)
    return time.perf_counter() - started


def _composer(task: Task, threshold: float) -> float:
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.models import ComposerModel

    network, loader, optimizer = task.parts()

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Any) -> Any:
            return self.inner(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return F.cross_entropy(outputs, batch[1])

    trainer = Trainer(
        model=Model(network),
        train_dataloader=loader,
        max_duration=f"{task.steps}ba",
        optimizers=optimizer,
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=threshold)],
        device="cpu",
        progress_bar=False,
    )
    started = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - started
    trainer.close()
    return seconds
