"""Trainings of the models of :mod:`tests.libraries.cases`, by the runner and by plain PyTorch."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from runner.compose.request import request
from runner.config.check import parse
from runner.train import build
from runner.train.job import make_trainer
from tests.libraries.cases import LIMIT, LR, MOMENTUM, STEPS, words_for


def plain_of(name: str, plugin: str, ranks: int, *more: str) -> dict[str, Any]:
    """The configuration of a run, to hand to ranks."""
    [job] = request([*words_for(name, ranks), *plugin.split(), *more], writes=False).jobs
    return job.plain


def trained(plains: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Train by each configuration on every rank, and compare with plain PyTorch on the first one.

    Returns:
        The largest difference of each parameter from plain PyTorch, on the first rank.
    """
    torch.set_default_dtype(torch.float64)
    return [_compared(parse(plain)) for plain in plains]


def _compared(config: Any) -> dict[str, float]:
    data: Any = build.make_data(config.data).train
    data.read.clear()
    trainer = make_trainer(config, [], evaluates=False)
    trainer.fit()
    plugin = trainer.plugin
    read: list[Any] = [list(data.read)]
    if plugin.world_size > 1:
        read = [None] * plugin.world_size
        dist.all_gather_object(read, list(data.read))
    weights = trainer.booster.state_dict(trainer.model)
    if dist.get_rank():
        return {}
    model, start = _fresh(config), _fresh(config)
    plainly(model, data, read[: plugin.data_size], config.data.batch_size)
    moved = [
        (a - b).abs().max() for a, b in zip(model.parameters(), start.parameters(), strict=True)
    ]
    assert max(moved) > 1e-4, moved
    return {
        name: float((weights[name].detach() - wanted.detach()).abs().max())
        for name, wanted in model.named_parameters()
    }


def _fresh(config: Any) -> nn.Module:
    """The model as the documented seed makes it."""
    torch.manual_seed(config.seed)
    model: nn.Module = build.maker(config.model)()
    return model


def plainly(model: nn.Module, data: Any, read: list[list[int]], size: int) -> None:
    """Train by plain PyTorch: the norm clipped, SGD with momentum.

    Images of each rank go through the model in turn, because batch norm is over the samples of one
    rank. Batches of transformers are those of all ranks at once.
    """
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    model.train()
    for step in range(STEPS):
        parts = [each[step * size : (step + 1) * size] for each in read]
        assert sum(map(len, parts)) == 8
        optimizer.zero_grad()
        if isinstance(data.tensors, dict):
            model(**data.batch([*chain.from_iterable(parts)])).loss.backward()
        else:
            for inputs, targets in map(data.batch, parts):
                (F.cross_entropy(model(inputs), targets, reduction="sum") / 8).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((LIMIT / norm).clamp(max=1))
        optimizer.step()
