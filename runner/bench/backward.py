"""The memory of gradients, and the time of a step, with clipping and steps in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from runner.bench.pairs import Side, Spread, interleave, milliseconds, ratio
from runner.bench.subjects import clock_of, gpt
from runner.bench.table import Row, Setting
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

Make = Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]
"""Makes a model, and what computes a loss of it."""


class LiveGradients:
    """Counts the bytes of gradients that are alive at once in backward passes.

    A gradient counts from when autograd has accumulated it until its memory is freed, whoever
    refers to it.

    Args:
        model: the model, before anybody else registers hooks on its parameters.

    Attributes:
        most: largest number of bytes so far.
    """

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
    for name, make in _models(setting.quick).items():
        steps, counts = {}, {}
        for way, does in WAYS.items():
            steps[way], counts[way] = _training(make, does, setting.device)
        sides: dict[str, Side] = {
            way: partial(clock_of(setting.device), step) for way, step in steps.items()
        }
        times = interleave(sides, setting.pairs())
        medians = milliseconds(times)
        for way, count in counts.items():
            size = count.most / 2**20
            yield Row(f"{name}, {way}: gradients at most", Spread(size, size, size, 1), unit="MB")
        for way in list(WAYS)[1:]:
            shown = {"step": medians["clip.when=step"], way: medians[way]}
            yield Row(f"{name}, {way}: time", ratio(times[way], times["clip.when=step"]), ms=shown)


def _models(quick: bool) -> dict[str, Make]:
    if quick:
        return {"gpt 2x96": partial(_gpt, 2, 96)}
    return {"resnet18": _resnet, "gpt 12x384": partial(_gpt, 12, 384)}


def _gpt(layers: int, width: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    tokens = torch.randint(256, (BATCH, 128))

    def loss(model: nn.Module) -> Tensor:
        given = tokens.to(next(model.parameters()).device)
        return nn.functional.cross_entropy(model(given).flatten(0, 1), given.flatten())

    return gpt(layers, width), loss


def _resnet() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from torchvision.models import resnet18

    images, targets = torch.randn(BATCH, 3, 64, 64), torch.randint(1_000, (BATCH,))

    def loss(model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        return nn.functional.cross_entropy(model(images.to(device)), targets.to(device))

    return resnet18(), loss


def _training(make: Make, does: str, device: str) -> tuple[Callable[[], None], LiveGradients]:
    """Return a function that takes a step, and the count of its gradients."""
    torch.manual_seed(0)
    net, loss = make()
    net.to(device)
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
