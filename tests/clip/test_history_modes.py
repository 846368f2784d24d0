"""Modes ``percentile``, ``zscore`` and ``schedule`` against their rules, over 400 steps."""

import copy
import math
from statistics import fmean, pvariance

import numpy as np
import pytest
import torch
from torch import nn

from runner.calibrate.calibrate import Tally
from runner.clip import build
from runner.gradients import Layout
from tests.clip.reference import on, unwaited

STEPS = 400
NAN, INF = math.nan, math.inf
LINES = {"warmup": "linear", "decay": "linear", "steps": 90}
COSINE = {"decay": "cosine", "steps": 400, "end_factor": 0.25}
CASES = [
    *(("percentile", {"threshold": 10.0, "min_steps": 1}), ("percentile", {"threshold": 90.0})),
    ("percentile", {"threshold": 50.0, "window": 37, "factor": 1.5}),
    ("percentile", {"threshold": 75.0, "history": "clipped", "window": 100, "min_steps": 100}),
    ("percentile", {"threshold": 100.0, "window": 1, "min_steps": 1}),
    *(("zscore", {"threshold": 2.5}), ("zscore", {"threshold": 1.0, "rule": "mean"})),
    ("zscore", {"threshold": 2.0, "rule": "percentile"}),
    ("zscore", {"threshold": 1.5, "history": "raw", "decay": 0.9, "warmup_steps": 7}),
    ("zscore", {"threshold": 0.1, "warmup_steps": 1, "eps": 1e-3}),
    ("schedule", {"threshold": 0.8, "warmup_steps": 100}),
    ("schedule", {"threshold": 0.8, "warmup_steps": 100, "warmup_factor": 4.0, **LINES}),
    ("schedule", {"threshold": 0.8, "warmup_steps": 0, **COSINE}),
    ("schedule", {"threshold": 0.8, "warmup_steps": 0}),
]
EACH = pytest.mark.parametrize(("name", "options"), CASES)


def made_up():
    """Norms by what they test; those of three kinds are not all finite."""
    draw = np.random.default_rng(0)
    usual = np.exp(draw.normal(0, 0.3, STEPS))
    found = {"usual": usual}
    found["spikes"] = np.where(draw.random(STEPS) < 0.03, 1e4 * usual, usual)
    found["plateau"] = np.concatenate([usual[:100], np.full(200, 2.5), usual[300:]])
    found["constant"] = np.full(STEPS, 0.7)
    found["zeros"] = np.where(draw.random(STEPS) < 0.4, 0.0, usual)
    found["level shift"] = np.where(np.arange(STEPS) < 200, usual, 20 * usual)
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


def clipped(mode, norms, on_device=False):
    """Norms measured after each step, and its seven metrics; an accelerator is not waited for."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    direction = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    layout = Layout.of_parameters([weight])
    mode.bind(layout)
    found = []
    for norm in norms:
        weight.grad = direction * norm if math.isfinite(norm) else torch.full_like(direction, norm)
        with on(on_device), unwaited(on_device):
            decision = mode.clip(layout)
        assert all(metric.shape == () for metric in decision.metrics)
        found.append((weight.grad.norm(), *decision.metrics))
    return [tuple(map(float, step)) for step in found]


def percentile(norms, threshold, window=None, history="raw", min_steps=10, factor=1.0):
    """The norm after clipping and λ of each step, NaN where there is none."""
    past = []
    for norm in norms:
        if not math.isfinite(norm):
            yield NAN, NAN
            continue
        known = [*past, norm][-window if window else 0 :]
        limit = factor * float(np.percentile(known, threshold))
        if len(known) < min_steps or limit == 0:
            limit = NAN
        after = min(norm, limit) if limit == limit else norm
        past.append(norm if history == "raw" else after)
        yield after, limit


def zscore(norms, threshold, rule="adaptive_scaling", decay=0.97, warmup_steps=25, **rest):
    history, eps = rest.get("history", "clipped"), rest.get("eps", 1e-6)
    first, mean, variance = [], 0.0, 0.0
    for norm in norms:
        if not math.isfinite(norm):
            yield NAN, NAN
            continue
        limit, after = NAN, norm
        if len(first) == warmup_steps and (sigma := math.sqrt(variance)) > eps * mean:
            limit = mean + threshold * (sigma if rule == "percentile" else sigma + eps)
            if norm > limit:
                z = (norm - mean) / (sigma + eps)
                after = {
                    "adaptive_scaling": mean + threshold * sigma / (z / threshold),
                    "mean": mean,
                    "percentile": mean + threshold * sigma,
                }[rule]
        enters = norm if history == "raw" else after
        if len(first) < warmup_steps:
            first.append(enters)
            mean, variance = fmean(first), pvariance(first)
        else:
            mean = decay * mean + (1 - decay) * enters
            variance = decay * variance + (1 - decay) * (enters - mean) ** 2
        yield after, limit


def limit_of(base, step, warmup_steps, **rest):
    """λ of a step, counted from 0."""
    end, length = rest.get("end_factor", 0.1), rest.get("steps")
    if step < warmup_steps:
        factor = rest.get("warmup_factor", 10.0)
        if rest.get("warmup") == "linear":
            factor -= (factor - 1) * step / warmup_steps
        return base * factor
    if length is None:
        return base
    at = min(1.0, (step - warmup_steps) / length)
    if rest["decay"] == "linear":
        return base * (1 - at * (1 - end))
    return base * (end + (1 - end) * math.cos(math.pi * at / 2) ** 2)


def schedule(norms, threshold, **options):
    """Also a step that is not finite counts."""
    for step, norm in enumerate(norms):
        limit = limit_of(threshold, step, **options)
        yield (min(norm, limit) if math.isfinite(norm) else NAN), limit


REFERENCE = {"percentile": percentile, "zscore": zscore, "schedule": schedule}


@EACH
def test_every_step_is_that_of_the_rule(name, options):
    number, kinds = CASES.index((name, options)), [*SEQUENCES.values()]
    for norms in (SEQUENCES["spikes"], kinds[number % len(kinds)]):
        found = clipped(build(name, **options), norms)
        wanted = list(REFERENCE[name](norms, **options))
        rel = 1e-9 if name == "zscore" else 1e-12
        for norm, step, (right, limit) in zip(norms, found, wanted, strict=True):
            after, before, reported, coef, changed, share, stat, known = step
            assert known == pytest.approx(limit, rel=rel, nan_ok=True)
            assert changed == share
            if not math.isfinite(norm):
                assert changed == 0
                assert not math.isfinite(after)
                assert math.isnan(coef)
                continue
            assert (before, stat) == pytest.approx((norm, norm), rel=1e-12)
            assert (after, reported) == pytest.approx((right, right), rel=rel)
            assert changed == float(norm > limit) or norm == pytest.approx(limit, rel=1e-12)
            assert changed == 0 or right <= norm


def with_inner_history(name, options):
    if name == "schedule":
        return {**options, "of": {"mode": "percentile", "min_steps": 3}}
    return options


@EACH
def test_an_accelerator_decides_as_a_host(name, options):
    options = with_inner_history(name, options)
    norms = SEQUENCES["spikes"][:70]
    on_host = clipped(build(name, **options), norms, on_device=False)
    on_accelerator = clipped(build(name, **options), norms, on_device=True)
    for host, accelerator in zip(on_host, on_accelerator, strict=True):
        assert accelerator[1:] == pytest.approx(host[1:], rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("began_on_device", [False, True])
@EACH
def test_a_resumed_history_decides_as_one_that_went_on(name, options, began_on_device, tmp_path):
    options = with_inner_history(name, options)
    norms = SEQUENCES["spikes"][:70]
    whole = clipped(build(name, **options), norms, on_device=began_on_device)
    mode = build(name, **options)
    clipped(mode, norms[:40], on_device=began_on_device)
    torch.save(mode.state_dict(), tmp_path / "state")
    resumed = build(name, **options)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    # A host and a device sum the squares of ‖G‖ and take roots in different ways.
    rel = 1e-12 if began_on_device else 0
    for expected, step in zip(whole[40:], clipped(resumed, norms[40:]), strict=True):
        assert step[1:] == pytest.approx(expected[1:], rel=rel, abs=0, nan_ok=True)


def test_moments_of_large_norms_keep_their_digits():
    norms = [1e9 + step % 2 for step in range(25)]
    mode = build("zscore", threshold=2.5)
    clipped(mode, norms)
    state = mode.state_dict()["memory"]
    assert state["mean"] == pytest.approx(fmean(norms), rel=1e-15)
    assert state["variance"] == pytest.approx(pvariance(norms), rel=1e-6)


def test_norms_beyond_the_window_are_forgotten():
    usual = SEQUENCES["usual"]
    mode = build("percentile", threshold=10.0, window=20, min_steps=5)
    clipped(mode, [100.0] * 50 + usual[:20])
    assert mode.state_dict()["memory"]["norms"].tolist() == pytest.approx(usual[:20])
    shorter = build("percentile", threshold=10.0, window=5, min_steps=5)
    shorter.load_state_dict(mode.state_dict())
    assert shorter.state_dict()["memory"]["norms"].tolist() == pytest.approx(usual[15:20])


# -- schedule


def test_a_threshold_that_is_changed_counts_from_the_next_step():
    options = {"decay": "linear", "steps": 4, "end_factor": 1e-9}
    mode = build("schedule", threshold=0.8, warmup_steps=0, **options)
    first = clipped(mode, [100.0, 100.0])
    mode.threshold = 8.0
    after = [step[0] for step in first + clipped(mode, [100.0, 100.0])]
    assert after == pytest.approx([0.8, 0.6, 4, 2], rel=1e-6)


@pytest.mark.parametrize(
    ("of", "threshold", "total"),
    [("value", 0.02, 754), ({"mode": "adaptive", "eps": 0.5}, 0.05, 32)],
)
def test_modes_with_parts_clip_by_the_threshold_of_the_step(of, threshold, total):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4))
    layout = Layout.of_model(model)
    plain_layout = Layout.of_model(copy.deepcopy(model))
    name, options = (of, {}) if isinstance(of, str) else (of["mode"], {"eps": of["eps"]})
    warm = {"warmup_steps": 2, "warmup_factor": 3.0, "warmup": "linear"}
    mode = build("schedule", threshold=threshold, of=of, **warm)
    mode.bind(layout)
    mode.tally = Tally()
    for factor in (3, 2, 1):
        pairs = [*zip(layout.shards, plain_layout.shards, strict=True)]
        for shard, plain_shard in pairs:
            shard.param.grad = torch.randn_like(shard.param)
            plain_shard.param.grad = shard.param.grad.clone()
        plain = build(name, threshold=factor * threshold, **options)
        decision = mode.clip(layout)
        expected = plain.clip(plain_layout)
        assert decision.metrics == pytest.approx(expected.metrics, rel=1e-12)
        assert expected.clipped == 1
        for shard, plain_shard in pairs:
            assert torch.equal(shard.param.grad, plain_shard.param.grad)
    assert mode.tally.gather(layout)[1] == 3 * total
