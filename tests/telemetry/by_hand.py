"""What the optional measurements of a training should be, in plain PyTorch and float64."""

import copy
import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

Gradient = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
IGNORED = -100


def cell(model, batch):
    """Number of targets of one microbatch that count, and the gradient of their mean loss."""
    inputs, targets = batch
    outputs = model(inputs)
    loss = F.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    items = float((targets != IGNORED).sum())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss / items, list(named.values()), allow_unused=True)
    return items, {n: g for n, g in zip(named, found, strict=True) if g is not None}


def mean(cells):
    """Gradient of the mean loss over all items of several parts."""
    total = sum(n for n, _ in cells)
    return total, {k: sum((n / total) * g[k] for n, g in cells) for k in cells[0][1]}


def square(gradient):
    return math.fsum(float(g.double().square().sum()) for g in gradient.values())


def by_value(limit):
    return lambda g: {k: v.clamp(-limit, limit) for k, v in g.items()}


def by_norm(limit):
    return lambda g: {k: v * min(1.0, limit / math.sqrt(square(g))) for k, v in g.items()}


def by_tensor(limit):
    return lambda g: {k: v * min(1.0, limit / max(float(v.norm()), 1e-300)) for k, v in g.items()}


def train(model, steps, clip, rate):
    """Train a copy of a float64 model by SGD; return the measurements of each step, and of the run.

    ``steps`` are microbatches by step and rank.
    """
    model = copy.deepcopy(model)
    rows: list[dict[str, float]] = []
    for ranks in steps:
        cells = [cell(model, batch) for batch in itertools.chain.from_iterable(ranks)]
        _, before = mean(cells)
        after = clip(before)
        changed = any(bool((after[name] != before[name]).any()) for name in after)
        row: dict[str, float] = {"clipped": float(changed), "norm": math.sqrt(square(before))}
        trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
        weights = {k: p.detach().clone() for k, p in trained.items()}
        with torch.no_grad():
            for k, gradient in after.items():
                trained[k] -= rate * gradient
        change = {k: p.detach() - weights[k] for k, p in trained.items()}
        row["update/ratio"] = math.sqrt(square(change) / square(weights))
        for k, each in change.items():
            if weights[k].any():  # a bias that starts at zero has no ratio
                row[f"update/ratio/{k}"] = float(each.norm() / weights[k].norm())
        rows.append(row)
    clipped = [row["clipped"] for row in rows]
    runs = [len(list(run)) for was, run in itertools.groupby(clipped) if was]
    return rows, {"clip/longest_streak": max(runs, default=0)}
