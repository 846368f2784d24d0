"""What the optional measurements of a training should be, in plain PyTorch and float64."""

import copy
import itertools
import math
import statistics

import numpy as np
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


def away(a, b):
    return square({k: a[k] - b[k] for k in a})


def noise(ranks):
    """The covariance's trace of one item ÷ items of a step, and |G|², by an analysis of variance.

    ``ranks`` are the cells of the microbatches of each data-parallel rank that has samples.
    """
    whole = mean(list(itertools.chain.from_iterable(ranks)))
    of_ranks = [mean(cells) for cells in ranks]
    items, found = whole[0], {}
    within = sum(
        n * away(g, own[1]) for cells, own in zip(ranks, of_ranks, strict=True) for n, g in cells
    )
    freedom = sum(len(cells) - 1 for cells in ranks)
    if freedom:
        s = within / freedom / items
        q = sum(n / items * square(g) for n, g in of_ranks) - len(ranks) * s
        found["noise/microbatches"] = s, q
    if len(ranks) > 1:
        s = sum(n * away(g, whole[1]) for n, g in of_ranks) / (len(ranks) - 1) / items
        found["noise/ranks"] = s, square(whole[1]) - s
    return found


def ratio_and_error(pairs):
    """Ratio of the means, and its standard error by a first-order expansion."""
    s, q = np.array(pairs, dtype=np.float64).T
    ratio = s.mean() / q.mean()
    error = np.std(s - ratio * q, ddof=1) / math.sqrt(len(s)) / q.mean()
    return float(ratio), float(error)


def by_value(limit):
    return lambda g: {k: v.clamp(-limit, limit) for k, v in g.items()}


def by_norm(limit):
    return lambda g: {k: v * min(1.0, limit / math.sqrt(square(g))) for k, v in g.items()}


def by_tensor(limit):
    return lambda g: {k: v * min(1.0, limit / max(float(v.norm()), 1e-300)) for k, v in g.items()}


def train(model, steps, clip, rate, worst):
    """Train a copy of a float64 model by SGD; return the measurements of each step, and of the run.

    ``steps`` are microbatches by step and rank; ``worst`` parameters' shares are returned.
    """
    model = copy.deepcopy(model)
    rows: list[dict[str, float]] = []
    estimates: dict[str, list[tuple[float, float]]] = {}
    for ranks in steps:
        cells = [[cell(model, batch) for batch in batches] for batches in ranks]
        _, before = mean(list(itertools.chain.from_iterable(cells)))
        after = clip(before)
        changed = any(bool((after[name] != before[name]).any()) for name in after)
        row: dict[str, float] = {"clipped": float(changed), "norm": math.sqrt(square(before))}
        powers = {k: float(g.norm()) ** 2 for k, g in before.items()}
        largest = sorted(powers, key=powers.__getitem__, reverse=True)[:worst]
        row |= {f"grad/share/{k}": powers[k] / sum(powers.values()) for k in largest}
        product = math.fsum(float((before[k] * after[k]).sum()) for k in before)
        row["clip/cosine"] = product / math.sqrt(square(before) * square(after))
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
        samples = sum(len(batch[0]) for batches in ranks for batch in batches)
        for name, (s, q) in noise(cells).items():
            estimates.setdefault(name, []).append((s * samples, q))
        for name, seen in estimates.items():
            if len(seen) > 1 and sum(q for _, q in seen) > 0:
                row[f"{name}/scale"], row[f"{name}/error"] = ratio_and_error(seen)
        rows.append(row)
    clipped = [row["clipped"] for row in rows]
    runs = [len(list(run)) for was, run in itertools.groupby(clipped) if was]
    summary = {
        name: (*ratio_and_error(seen), len(seen))
        for name, seen in estimates.items()
        if len(seen) > 1 and sum(q for _, q in seen) > 0
    }
    return rows, {"clip/longest_streak": max(runs, default=0), **summary}


def spike_scores(values, sigma, window):
    """Share of spikes after each value; values that are not finite do not count."""
    found, finite, spikes = [], list[float](), 0
    for value in values:
        if math.isfinite(value):
            last = finite[-window:]
            if len(last) >= window / 2:
                spread = statistics.stdev(last)
                spikes += abs(value - statistics.mean(last)) > sigma * spread
            finite.append(value)
        found.append(spikes / max(len(finite), 1))
    return found
