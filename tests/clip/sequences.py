"""Norms of 500 steps, recorded and made up, and a gradient of each for a mode to clip."""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from runner.clip import ClipMode, Layout
from tests.clip.reference import on, unwaited

STEPS = 500
NAN, INF = math.nan, math.inf


@cache
def recorded() -> list[float]:
    """Gradient norms of a small recurrent network, whose training has spikes."""
    torch.manual_seed(3)
    net, head = nn.RNN(4, 16), nn.Linear(16, 1)
    weights = [*net.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.2)
    norms = []
    for _ in range(STEPS):
        inputs = torch.randn(12, 8, 4)
        loss = (head(net(inputs)[0][-1]) - inputs.sum((0, 2)).unsqueeze(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(math.sqrt(sum(float(w.grad.double().square().sum()) for w in weights)))
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return norms


def made_up() -> dict[str, list[float]]:
    """Norms by what they test; those of three kinds are not all finite."""
    draw = np.random.default_rng(0)
    usual = np.exp(draw.normal(0, 0.3, STEPS))
    found = {"usual": usual}
    found["spikes"] = np.where(draw.random(STEPS) < 0.03, 1e4 * usual, usual)
    found["plateau"] = np.concatenate([usual[:100], np.full(300, 2.5), usual[400:]])
    found["constant"] = np.full(STEPS, 0.7)
    found["zeros"] = np.where(draw.random(STEPS) < 0.4, 0.0, usual)
    found["level shift"] = np.where(np.arange(STEPS) < 250, usual, 20 * usual)
    found["falling"] = 5 * 0.98 ** np.arange(STEPS)
    found["huge"] = 1e15 * usual
    for name in ("spikes", "level shift", "zeros"):
        broken = found[name].copy()
        at = draw.random(STEPS)
        broken[at < 0.05], broken[at > 0.95] = NAN, INF
        broken[:3] = NAN, INF, NAN
        broken[200:230] = NAN
        found[name] = broken
    return {name: values.tolist() for name, values in found.items()}


SEQUENCES = made_up()


def clipped(
    mode: ClipMode, norms: Sequence[float], on_device: bool = False
) -> list[tuple[float, ...]]:
    """Clip a gradient of each norm.

    Returns:
        For each step the norm after clipping, measured on the gradient itself, and the seven
        metrics of the decision. On what stands for an accelerator the host reads nothing before the
        last step.
    """
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    direction = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    layout = Layout.of_parameters([weight])
    mode.bind(layout)
    found = []
    for norm in norms:
        weight.grad = direction * norm if math.isfinite(norm) else torch.full_like(direction, norm)
        with on(on_device), unwaited(on_device):
            decision = mode.clip(layout)
        assert on_device or all(type(metric) is float for metric in decision.metrics)
        found.append((weight.grad.norm(), *decision.metrics))
    return [tuple(map(float, step)) for step in found]


def as_wanted(
    norms: Sequence[float],
    found: Sequence[tuple[float, ...]],
    wanted: Sequence[tuple[float, float]],
    rel: float,
) -> Iterator[tuple[float, float, float, float]]:
    """Compare every step with the norm and the limit that are wanted of it.

    Yields:
        Norm, norm after clipping, limit, and whether the step was clipped, of each finite step.
    """
    for norm, step, (right, known) in zip(norms, found, wanted, strict=True):
        after, before, reported, coef, changed, share, stat, limit = step
        assert limit == pytest.approx(known, rel=rel, nan_ok=True)
        assert changed == share
        if not math.isfinite(norm):
            assert changed == 0
            assert not math.isfinite(after)
            assert math.isnan(coef)
            continue
        assert (before, stat) == pytest.approx((norm, norm), rel=1e-12)
        assert (after, reported) == pytest.approx((right, right), rel=rel)
        yield norm, right, known, changed
