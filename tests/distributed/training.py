"""Small training jobs that tests run in one process or on several ranks, and compare."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner import Trainer
from runner.booster import Plugin, SinglePlugin, TorchDDPPlugin
from runner.booster.plugin import TorchFSDPPlugin
from runner.clip import build
from runner.data.dataset import IGNORED, TensorPairs
from runner.models.gpt import GPT

THRESHOLDS = {"none": None, "norm": 0.3, "value": 0.01, "adaptive": 0.02}


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "single": SinglePlugin,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "hsdp": lambda: TorchFSDPPlugin(dp_replicate=2),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of a tensor, gathered if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Rows:
    """A sink that keeps rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self, summary: Any, exit_code: int) -> None:
        pass


def images(samples: int) -> TensorPairs:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 1, 8, 8, generator=generator)
    return TensorPairs(inputs, torch.randint(10, (samples,), generator=generator))


def tokens(samples: int) -> TensorPairs:
    """Sequences with very different shares of ignored tokens; one has no token that counts."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(16, (samples, 12), generator=generator)
    targets = torch.randint(16, (samples, 12), generator=generator)
    share = torch.rand(samples, 1, generator=generator)
    targets[torch.rand(samples, 12, generator=generator) < share] = IGNORED
    targets[3] = IGNORED
    return TensorPairs(inputs, targets)


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "tokens":
        return GPT(
            vocabulary=16,
            context=12,
            layers=2,
            heads=2,
            width=16,
            tied=True,
            bias=True,
            dropout=0.0,
        )
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(3 * 49, 10),
    )


def train(
    kind: str,
    mode: str,
    samples: int,
    batch_size: int,
    accumulation: int,
    plugin: str = "single",
    dtype: torch.dtype = torch.float64,
    epochs: int = 2,
) -> dict[str, Any]:
    """Rows, final weights and last clipped gradients of a short training by plain SGD."""
    spread = PLUGINS[plugin]()
    data = images(samples) if kind == "images" else tokens(samples)
    if data.inputs.is_floating_point():
        data.inputs = data.inputs.to(dtype)
    model = network(kind).to(dtype)
    loader = spread.prepare_dataloader(data, batch_size, shuffle=True, seed=5)
    rows = Rows()
    trainer = Trainer(
        model,
        loader,
        f"{epochs}ep",
        algorithms=build(mode, threshold=THRESHOLDS[mode]),
        eval_dataloader=spread.prepare_dataloader(data, batch_size),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.2),
        plugin=spread,
        accumulation_steps=accumulation,
        sinks=[rows],
    )
    gradients: list[list[torch.Tensor]] = []
    step = trainer.optimizer.step

    def keep() -> bool:
        gradients.append([whole(p.grad) for p in model.parameters()])
        return step()

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    summary = trainer.fit()
    return {
        "rows": rows.rows,
        "weights": [whole(p) for p in model.parameters()],
        "gradients": gradients,
        "summary": summary,
    }
