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
    gradients = torch.autograd.grad(loss / items, list(named.values()), allow_unused=True)
    return items, {n: g for n, g in zip(named, gradients, strict=True) if g is not None}


def mean(cells):
    """Gradient of the mean loss over all items of several parts."""
    total = sum(n for n, _ in cells)
    return total, {k: sum((n / total) * g[k] for n, g in cells) for k in cells[0][1]}


def square_of(gradient):
    return math.fsum(float(g.double().square().sum()) for g in gradient.values())


def by_value(limit):
    return lambda g: {k: v.clamp(-limit, limit) for k, v in g.items()}


def by_norm(limit):
    return lambda g: {k: v * min(1.0, limit / math.sqrt(square_of(g))) for k, v in g.items()}


def by_tensor(limit):
    return lambda g: {k: v * min(1.0, limit / max(float(v.norm()), 1e-300)) for k, v in g.items()}


def noise(firsts, items, samples, norm):
    """tr(Σ) and |G|² as equations A.2 and A.3 of McCandlish et al. 2018 have them, rank by rank."""
    estimates = []
    big = samples
    for rank_items, gradient in firsts:
        small = samples * rank_items / items
        square = square_of(gradient)
        signal = (big * norm**2 - small * square) / (big - small)
        estimates.append(((square - norm**2) / (1 / small - 1 / big), signal))
    return [math.fsum(values) / len(estimates) for values in zip(*estimates, strict=True)]


def largest_shares(gradient, number=3):
    """Return the parameters that make most of ‖G‖², each with its share, the largest first."""
    shares = {
        k: float(g.double().square().sum()) / square_of(gradient) for k, g in gradient.items()
    }
    return sorted(shares.items(), key=lambda pair: -pair[1])[:number]


def train(model, steps, clip, rate):
    """Train a copy of a float64 model by SGD; return the measurements of each step.

    ``steps`` are microbatches by step and rank.
    """
    model = copy.deepcopy(model)
    rows: list[dict[str, float]] = []
    noises: list[list[float]] = []
    for ranks in steps:
        cells = [[cell(model, batch) for batch in batches] for batches in ranks]
        items, before = mean([*itertools.chain.from_iterable(cells)])
        after = clip(before)
        row = {"norm": math.sqrt(square_of(before))}
        elements = torch.cat([gradient.flatten() for gradient in before.values()])
        row["grad/zeros"] = float((elements == 0).double().mean())
        row |= {f"grad/top/{name}": share for name, share in largest_shares(before)}
        samples = sum(len(inputs) for batches in ranks for inputs, _ in batches)
        if len(cells[0]) > 1:
            noises.append(
                noise([microbatches[0] for microbatches in cells], items, samples, row["norm"])
            )
        of_noise, of_mean = map(math.fsum, zip(*noises, strict=True)) if noises else (0.0, 0.0)
        row |= {"noise/scale": of_noise / of_mean} if of_mean > 0 else {}
        trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
        weights = {k: p.detach().clone() for k, p in trained.items()}
        with torch.no_grad():
            for k, gradient in after.items():
                trained[k] -= rate * gradient
        change = {k: p.detach() - weights[k] for k, p in trained.items()}
        row["update/norm"] = math.sqrt(square_of(change))
        row["update/ratio"] = math.sqrt(square_of(change) / square_of(weights))
        for k, difference in change.items():
            if weights[k].any():  # a bias that starts at zero has no ratio
                row[f"update/ratio/{k}"] = float(difference.norm() / weights[k].norm())
        rows.append(row)
    return rows
