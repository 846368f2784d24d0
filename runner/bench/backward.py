"""The memory of gradients, and the time of a step, with clipping and steps in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from runner.bench.pairs import Side, Spread, interleave
from runner.bench.subjects import clock_of, gpt, of_torchvision
from runner.bench.table import Row, Setting, compared
from runner.booster import Booster
from runner.clip import build
from runner.parallel.hooks import register_post_accumulate

TITLE = (
    "clip=value in the backward pass, with AdamW: most memory of gradients, time of whole steps\n"
    "1.00 is a step that clips after the backward pass (clip.when=step)"
)

WAYS = {"clip.when=step": "", "clip.when=backward": "clip", "step_in_backward": "step"}
"""What is done in the backward pass, by its name in the table."""

BATCH, THRESHOLD = 4, 1e-3

Loss = Callable[[nn.Module], Tensor]
Make = Callable[[str], tuple[nn.Module, Loss]]
"""Makes a model on a device, and what computes its loss."""


class LiveGradients:
    """Counts the bytes of gradients that are alive at once in backward passes."""

    def __init__(self, model: nn.Module) -> None:
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        for parameter in model.parameters():
            register_post_accumulate(self._count, parameter)

    def _count(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(size for _, size in self._alive.values()))


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; for each model the memory of each way, and the time of the other two."""
    models: dict[str, Make] = {"resnet18": _resnet, "gpt 12x384": partial(_gpt, 12, 384)}
    if setting.quick:
        models = {"gpt 2x96": partial(_gpt, 2, 96)}
    for name, make in models.items():
        sides: dict[str, Side] = {}
        counts = {}
        for way, does in WAYS.items():
            step, counts[way] = _training(make, does, setting.device)
            sides[way] = partial(clock_of(setting.device), step)
        times = interleave(sides, setting.pairs())
        for way, count in counts.items():
            size = Spread.of([count.most / 2**20])
            yield Row(f"{name}, {way}: gradients at most", size, unit="MB")
        for way in list(WAYS)[1:]:
            yield compared(f"{name}, {way}: time", times, way, "clip.when=step")


def _gpt(layers: int, width: int, device: str) -> tuple[nn.Module, Loss]:
    tokens = torch.randint(256, (BATCH, 128), device=device)

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return gpt(layers, width).to(device), loss


def _resnet(device: str) -> tuple[nn.Module, Loss]:
    images = torch.randn(BATCH, 3, 64, 64, device=device)
    targets = torch.randint(1_000, (BATCH,), device=device)
    model = of_torchvision("resnet18").to(device)
    return model, lambda model: nn.functional.cross_entropy(model(images), targets)


def _training(make: Make, does: str, device: str) -> tuple[Callable[[], None], LiveGradients]:
    """Return a function that takes a step, and the count of its gradients."""
    torch.manual_seed(0)
    net, loss = make(device)
    count = LiveGradients(net)
    booster = Booster(nonfinite="error")
    made = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    model, optimizer, *_ = booster.boost(net, made)
    mode = build("value", threshold=THRESHOLD)
    if does:
        optimizer.clip_in_backward(mode, step=does == "step")

    def step() -> None:
        booster.backward(loss(model), optimizer)
        optimizer.clip(mode)
        optimizer.step()
        optimizer.zero_grad()

    return step, count
