"""The record of somebody's own loop, against what plain PyTorch computes of the same gradients."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from runner import GradientMonitor, apply_gradient_clipping
from tests.on_device import Waits, kept_on_device

STEPS = 7


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loop(model, each, **options):
    """Call ``each(monitor, number, loss)`` with the gradients of a step; the rows."""
    rows = []
    monitor = GradientMonitor(model, rows.append, **options)
    generator = torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        loss = model(torch.randn(3, 4, generator=generator) * number).square().mean()
        loss.backward()
        each(monitor, number, loss)
        model.zero_grad()
    return rows, monitor.close()


def norm_of(model):
    return float(get_total_norm([p.grad for p in model.parameters()]))


def values(rows, key):
    return [row[key] for row in rows]


def test_torchs_own_clipping_by_the_norm():
    model, norms = make_model(), []

    def each(monitor, number, loss):
        norms.append(norm_of(model))
        norm = clip_grad_norm_(model.parameters(), 1.0)
        monitor.step(norm, threshold=1.0, loss=loss, lr=0.1, samples=3)

    rows, summary = loop(model, each)
    assert values(rows, "grad/norm") == pytest.approx(norms)
    assert values(rows, "grad/norm_clipped") == pytest.approx([min(n, 1.0) for n in norms])
    clipped = [int(norm > 1) for norm in norms]
    assert 0 < sum(clipped) < STEPS
    assert values(rows, "clip/clipped") == clipped
    assert values(rows, "train/samples") == [3 * n for n in range(1, STEPS + 1)]
    assert summary["clip/ratio_total"] == pytest.approx(sum(clipped) / STEPS)
    assert summary["grad/norm"]["max"] == pytest.approx(max(norms))


def test_torchs_own_clipping_by_value_which_returns_nothing():
    model, before, after = make_model(), [], []

    def each(monitor, number, loss):
        before.append(norm_of(model))
        assert monitor.measure() == pytest.approx(before[-1])
        clip_grad_value_(model.parameters(), 0.1)
        after.append(norm_of(model))
        monitor.step()

    rows, _ = loop(model, each)
    assert values(rows, "grad/norm") == pytest.approx(before)
    assert values(rows, "grad/norm_clipped") == pytest.approx(after)
    assert values(rows, "clip/clipped") == [int(a < b) for a, b in zip(after, before, strict=True)]
    told = {"train/loss", "train/lr", "train/samples", "throughput/samples_per_s"}
    assert not told & rows[0].keys()


def test_windows_cover_all_steps_since_the_row_before():
    model, norms, losses = make_model(), [], []

    def each(monitor, number, loss):
        norms.append(norm_of(model))
        losses.append(loss.item())
        monitor.step(apply_gradient_clipping(model, "norm", 1.0), loss=loss)

    rows, summary = loop(model, each, interval=3, flush=4, what_if=[2.0])
    assert values(rows, "train/step") == [3, 6]
    for row, at in zip(rows, (slice(0, 3), slice(3, 6)), strict=True):
        assert row["grad/norm_mean"] == pytest.approx(sum(norms[at]) / 3)
        assert row["grad/norm_max"] == pytest.approx(max(norms[at]))
        assert row["clip/ratio"] == pytest.approx(sum(n > 1 for n in norms[at]) / 3)
        assert row["train/loss"] == pytest.approx(losses[at][-1])
    assert summary["steps"] == STEPS
    assert summary["clip/what_if/2.0"] == pytest.approx(sum(n > 2 for n in norms) / STEPS)


def test_norms_of_parameters_are_those_before_clipping():
    model, wanted = make_model(), []

    def each(monitor, number, loss):
        wanted.append({f"grad/norm/{n}": float(p.grad.norm()) for n, p in model.named_parameters()})
        monitor.measure()
        monitor.step(apply_gradient_clipping(model, "norm", 0.01))

    rows, _ = loop(model, each, per_layer=True, interval=2)
    for row, norms in zip(rows, wanted[1::2], strict=True):
        assert {key: row[key] for key in norms} == pytest.approx(norms)


def test_on_an_accelerator_the_host_waits_at_a_flush_only():
    model, left = make_model(), []

    def each(monitor, number, loss):
        with Waits() as seen:
            monitor.measure()
            monitor.step(clip_grad_norm_(model.parameters(), 1.0), threshold=1.0, loss=loss)
        assert not seen.found
        left.append(len(monitor._meter.norms))

    with kept_on_device():
        rows, _ = loop(model, each, flush=3)
    assert left == [0, 0, 3, 3, 3, 6, 6]
    norms = []

    def by_hand(monitor, number, loss):
        norms.append(norm_of(model))
        monitor.step(loss=loss)

    loop(model, by_hand)
    assert values(rows, "grad/norm") == pytest.approx(norms, rel=1e-6)


def test_rows_are_appended_to_a_file_and_a_loop_goes_on(tmp_path):
    file = tmp_path / "new" / "rows.jsonl"
    model, state = make_model(), None
    for start in (0, 2):
        with GradientMonitor(model, file, str(tmp_path)) as monitor:
            if state is not None:
                monitor.load_state_dict(state)
            for number in range(1, 3):
                model(torch.full((1, 4), float(start + number))).sum().backward()
                monitor.step(samples=1)
                model.zero_grad()
            state = monitor.state_dict()
    rows = list(map(json.loads, file.read_text().splitlines()))
    assert values(rows, "train/step") == [1, 2, 3, 4]
    assert values(rows, "train/samples") == [1, 2, 3, 4]
    assert (tmp_path / "metrics.jsonl").read_text() == file.read_text()


def test_a_loop_that_breaks_off_leaves_its_rows(tmp_path):
    model = make_model()

    def break_off():
        with GradientMonitor(model, tmp_path, flush=50) as monitor:
            model(torch.ones(1, 4)).sum().backward()
            monitor.step()
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_gradients_that_are_not_finite_count_as_skipped():
    model = make_model()

    def each(monitor, number, loss):
        if number == 2:
            model[0].weight.grad[0, 0] = math.nan
        monitor.step(apply_gradient_clipping(model, "norm", 1.0))

    rows, _ = loop(model, each)
    assert values(rows, "grad/nonfinite") == [0] + [1] * (STEPS - 1)


def test_what_is_missing_is_named():
    model = make_model()
    monitor = GradientMonitor(model)
    with pytest.raises(ValueError, match="give the threshold too"):
        monitor.step(1.0)
    with pytest.raises(ValueError, match=r"per_layer needs monitor.measure\(\) before"):
        GradientMonitor(model, per_layer=True).step()
    with pytest.raises(TypeError, match="rows go to a path"):
        GradientMonitor(model, 3)
