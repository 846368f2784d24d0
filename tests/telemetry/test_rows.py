"""Rows, measurements and layer norms, of a training and of somebody's own loop."""

import json
import math
import random
import statistics
from contextlib import nullcontext, suppress
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from runner import GradientMonitor, Loss, Measurements, apply_gradient_clipping
from runner.clip import Decision, build
from runner.run_folder import keys
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics, noise_estimates, on_host
from tests.distributed.training import Rows
from tests.on_device import Waits, kept_on_device
from tests.train.test_trainer import parts
from tests.trainers import trainer_of


def decided(norm, after, share=1.0):
    numbers = {"norm": norm, "after": after, "parts_clipped": share, "threshold": 1.0}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    return Decision(**tensors)


def step(number, decision, loss=1.0, layers=None):
    numbers = {
        keys.LOCAL_LOSS: loss,
        keys.TRAIN_LR: 0.1,
        keys.TRAIN_SAMPLES: 8 * number,
        keys.TIME_STEP: 0.5,
    }
    return StepMetrics(number, decision, numbers, layers)


def test_what_is_recorded_does_not_depend_on_when_metrics_reach_the_host():
    random.seed(0)
    steps = []
    for number in range(1, 101):
        norm = random.choice([math.nan, math.inf, *[random.lognormvariate(0, 3)] * 20])
        clipped = random.random() < 0.3
        outcome = decided(norm, norm / 3 if clipped else norm, share=0.1 * clipped)
        steps.append(step(number, outcome, loss=random.choice([math.nan, *[random.random()] * 9])))
    results = []
    for every in (1, 7, 1000):
        rows = Rows()
        meter = Meter([rows], interval=4, flush_every=every, what_if=[0.5, 2.0])
        for metrics in steps:
            meter.push(metrics, {"eval/loss": 1.0} if metrics.step % 50 == 0 else None)
        results.append(repr((rows.rows, meter.summary(), meter.state_dict())))
    assert results[0] == results[1] == results[2]
    assert results[0].count("'train/step'") == 27


def test_steps_of_all_kinds_are_read_together_as_they_are_one_by_one():
    """A factor, a share of elements, a step that is skipped, and one that a device skips."""
    norm = torch.tensor(4.0, dtype=torch.float64)
    finite = torch.tensor(False)
    decisions = [
        Decision(norm, norm / 2, factor=norm / 8),
        decided(3.0, 2.0, share=0.25),
        Decision.skipped(norm * math.inf, 1.0),
        Decision(norm, norm, factor=norm / 8, finite=finite),
    ]
    steps = [step(number, decision) for number, decision in enumerate(decisions, 1)]
    together, _ = on_host(steps)
    alone = [on_host([metrics])[0][0] for metrics in steps]
    assert repr(together) == repr(alone)
    expected = [[metric.item() for metric in decision.metrics] for decision in decisions]
    read = [[numbers[key] for key in keys.OF_DECISION.values()] for numbers in together]
    assert repr([*read[:2], read[3]]) == repr([*expected[:2], expected[3]])


def test_sums_since_the_last_row_are_those_of_a_plain_loop():
    norms = [0.1, 0.7, 1e16, 3.0, math.nan, 2.0, 0.3, math.inf, 0.9]
    rows = Rows()
    meter = Meter([rows], interval=3, flush_every=7)
    for number, norm in enumerate(norms, 1):
        # λ/inf and inf·0, as a device computes them without looking, are not counted as clipped.
        decision = decided(norm, math.nan, share=1.0)
        meter.push(step(number, decision, loss=norm))
    meter.flush()
    for row, part in zip(rows.rows, (norms[:3], norms[3:6], norms[6:]), strict=True):
        lost = any(map(math.isnan, part))
        expected = sum(part) / 3, math.nan if lost else max(part)
        assert repr((row["grad/norm_mean"], row["grad/norm_max"])) == repr(expected)
    assert [row["grad/nonfinite"] for row in rows.rows] == [0, 1, 2]
    summary = meter.summary()
    assert summary["best"] == {"train/loss": 0.1}
    assert summary["clip/ratio_total"] == pytest.approx(7 / 9)


def logged(per_layer, norm_type=2.0, **options):
    """Rows of a short training, and the trainer, which has not run."""
    model, loader = parts(samples=112)
    rows = Rows()
    trainer = trainer_of(
        model,
        list(loader),
        "14ba",
        build("norm", threshold=0.3, norm_type=norm_type),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        sinks=[rows],
        log_interval=3,
        log_flush=4,
        per_layer=per_layer,
        **options,
    )
    return rows.rows, trainer


@cache
def on_device(norm_type):
    """The rows on a device, the waits for it, the steps of transfers, and the keys of layers."""
    every = Measurements(update_ratio=True, zeros=True)
    rows, trainer = logged(True, norm_type, measurements=every)
    transfers = []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        if tensor.is_floating_point():  # not the targets of a batch, which are on the host
            transfers.append(trainer.state.progress.step)
        return tolist(tensor)

    with kept_on_device(), patch.object(torch.Tensor, "tolist", counted), Waits() as waits:
        trainer.fit()
    keys = {f"grad/norm/{name}" for name, _ in trainer.model.unwrap().named_parameters()}
    return rows, waits.found, transfers, keys


NORM_TYPES = pytest.mark.parametrize("norm_type", [2.0, math.inf])


@NORM_TYPES
def test_no_step_waits_for_the_device(norm_type):
    _, waits, _, _ = on_device(norm_type)
    assert not waits


@NORM_TYPES
def test_metrics_leave_the_device_at_a_flush_alone(norm_type):
    _, _, transfers, _ = on_device(norm_type)
    assert set(transfers) == {4, 8, 12, 14}


@NORM_TYPES
def test_layer_norms_of_a_device_are_those_of_the_host(norm_type):
    rows, _, _, keys = on_device(norm_type)
    host, trainer = logged(True, norm_type)
    trainer.fit()
    assert [row["train/step"] for row in rows] == [3, 6, 9, 12, 14]
    for row, expected in zip(rows, host, strict=True):
        norms = [row[key] for key in keys]
        assert norms == pytest.approx([expected[key] for key in keys], rel=1e-6)
        total = max(norms) if norm_type == math.inf else math.hypot(*norms)
        assert total == pytest.approx(row["grad/norm"], rel=1e-6)


@NORM_TYPES
def test_metrics_of_layers_are_added_to_the_others(norm_type):
    rows, _, _, keys = on_device(norm_type)
    host, trainer = logged(True, norm_type)
    trainer.fit()
    plain, trainer = logged(False, norm_type)
    trainer.fit()
    asked = {key.replace("grad/norm", "update/ratio") for key in keys}
    asked |= {"update/ratio", "update/norm", "grad/zeros"}
    for row, with_layers, without in zip(rows, host, plain, strict=True):
        assert with_layers.keys() - without.keys() == keys
        assert row.keys() - without.keys() == keys | asked


@NORM_TYPES
def test_a_row_of_an_evaluation_has_the_metrics_of_layers(norm_type):
    options = {"eval_dataloader": parts()[1], "eval_interval": "7ba"}
    rows, trainer = logged(True, norm_type, **options)
    trainer.fit()
    keys = {f"grad/norm/{name}" for name, _ in trainer.model.unwrap().named_parameters()}
    assert [row["train/step"] for row in rows if keys < row.keys()] == [3, 6, 7, 9, 12, 14]


def test_an_update_that_is_far_above_the_rows_before_is_told_in_their_deviations():
    sink = Rows()
    meter = Meter([sink])
    norms = [1.0 + 0.1 * math.sin(number) for number in range(40)] + [5.0]
    decision = Decision.untouched(torch.ones(()), None)
    for number, norm in enumerate(norms, 1):
        metrics = step(number, decision)
        metrics.numbers["update/norm"] = norm
        meter.push(metrics)
        if number == 30:  # a run that continues
            state = meter.state_dict()
            meter = Meter([sink])
            meter.load_state_dict(state)
    meter.flush()
    rows = sink.rows
    assert [("update/sigma" in row) for row in rows] == [False] * 16 + [True] * 25
    for number in (16, 33, 40):
        before = norms[:number]
        expected = (norms[number] - statistics.mean(before)) / statistics.stdev(before)
        assert rows[number]["update/sigma"] == pytest.approx(expected)
    assert rows[40]["update/sigma"] > 40


STEPS = 7


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loop(model, step_of_loop, **options):
    """Call ``each(monitor, loss, rows)`` with the gradients of a step; the rows and the summary."""
    rows = []
    monitor = GradientMonitor(model, rows.append, **options)
    generator = torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        loss = model(torch.randn(3, 4, generator=generator) * number).square().mean()
        loss.backward()
        step_of_loop(monitor, loss, rows)
        model.zero_grad()
    return rows, monitor.close()


def norm_of(model):
    return float(get_total_norm([p.grad for p in model.parameters()]))


def values(rows, key):
    return [row[key] for row in rows]


@pytest.mark.parametrize("device", [False, True])
def test_torchs_own_clipping_by_the_norm(device):
    """On an accelerator the host waits for no step, and reads metrics at a flush only."""
    model = make_model()
    norms = []
    written = []

    def step_of_loop(monitor, loss, rows):
        norms.append(norm_of(model))
        with Waits() as waits:
            norm = clip_grad_norm_(model.parameters(), 1.0)
            monitor.step(norm, threshold=1.0, loss=loss, lr=0.1, samples=3)
        assert not (device and waits.found)
        written.append(len(rows))

    with kept_on_device() if device else nullcontext():
        rows, summary = loop(model, step_of_loop, flush=3)
    assert written == [0, 0, 3, 3, 3, 6, 6]
    assert values(rows, "grad/norm") == pytest.approx(norms)
    assert values(rows, "grad/norm_clipped") == pytest.approx([min(n, 1.0) for n in norms])
    clipped = [int(norm > 1) for norm in norms]
    assert 0 < sum(clipped) < STEPS
    assert values(rows, "clip/clipped") == clipped
    assert values(rows, "train/samples") == [3 * n for n in range(1, STEPS + 1)]
    assert summary["clip/ratio_total"] == pytest.approx(sum(clipped) / STEPS)
    assert summary["grad/norm"]["max"] == pytest.approx(max(norms))


def test_a_loop_that_does_not_clip_is_measured():
    model = make_model()
    norms = []

    def step_of_loop(monitor, loss, rows):
        norms.append(norm_of(model))
        monitor.step()

    rows, _ = loop(model, step_of_loop)
    assert values(rows, "grad/norm") == pytest.approx(norms)
    assert values(rows, "clip/clipped") == [0] * STEPS
    unknown = {"train/loss", "train/lr", "train/samples", "throughput/samples_per_s"}
    assert not unknown & rows[0].keys()
    with pytest.raises(ValueError, match="give the threshold too"):
        GradientMonitor(model).step(1.0)


def ours_by_value(model):
    return apply_gradient_clipping(model, "value", 0.2), None


def torchs_by_norm(model):
    return clip_grad_norm_(model.parameters(), 1.0), 1.0


@pytest.mark.parametrize("clip", [ours_by_value, torchs_by_norm])
def test_a_loop_of_ones_own_records_each_parameter_before_clipping(clip):
    model = make_model()
    expected = []

    def step_of_loop(monitor, loss, rows):
        norms = {name: float(p.grad.double().norm()) for name, p in model.named_parameters()}
        total = math.hypot(*norms.values())
        largest = sorted(norms, key=norms.get)[-2:]
        row = {f"grad/norm/{name}": norm for name, norm in norms.items()}
        decision, threshold = clip(model)
        if total > 1.0 or threshold is None:
            row |= {f"grad/top/{name}": (norms[name] / total) ** 2 for name in largest}
        monitor.step(decision, threshold=threshold)
        expected.append(row)

    rows, summary = loop(model, step_of_loop, per_layer=True, top=2)
    for row, numbers in zip(rows, expected, strict=True):
        of_parameters = {key: row[key] for key in row if key.startswith(("grad/norm/", "grad/top"))}
        assert of_parameters == pytest.approx(numbers, rel=1e-5)
    assert summary["grad/top"]["clipped"]["steps"] == sum(values(rows, "clip/clipped"))


def test_a_loop_that_goes_on_after_it_broke_off_writes_each_step_once(tmp_path):
    file = tmp_path / "new" / "rows.jsonl"
    model = make_model()
    state = None
    for start in (0, 2):  # the first loop breaks off a step after its state was saved
        with suppress(KeyError), GradientMonitor(model, file, str(tmp_path), flush=50) as monitor:
            if state is not None:
                monitor.load_state_dict(state)
            for number in range(start + 1, start + 4):
                model(torch.full((1, 4), float(number))).sum().backward()
                norm = norm_of(model)
                monitor.step(norm, threshold=norm * (1 + number % 2) / 1.5, samples=1)
                model.zero_grad()
                state = monitor.state_dict() if number == start + 2 else state
            raise KeyError
    rows = list(map(json.loads, file.read_text().splitlines()))
    assert values(rows, "train/step") == values(rows, "train/samples") == [1, 2, 3, 4, 5]
    assert values(rows, "clip/clipped") == [0, 1, 0, 1, 0]
    assert values(rows, "clip/ratio_total") == [0, 1 / 2, 1 / 3, 1 / 2, 2 / 5]
    assert (tmp_path / "metrics.jsonl").read_text() == file.read_text()


def test_a_loop_that_begins_anew_leaves_the_rows_of_the_earlier_one_aside(tmp_path):
    file = tmp_path / "rows.jsonl"
    with GradientMonitor(make_model(), file) as monitor:
        for _ in range(3):
            monitor.step(2.0, threshold=1.0)
    warned = pytest.warns(UserWarning, match=r"up to step 3 of an earlier run, .*rows\.1\.jsonl")
    with warned, GradientMonitor(make_model(), file) as monitor:
        monitor.step(5.0, threshold=1.0)
    with pytest.raises(ValueError, match=r"rows\.jsonl is closed"):
        monitor.step(1.0, threshold=1.0)
    steps = {}
    for name in ("rows.jsonl", "rows.1.jsonl"):
        rows = map(json.loads, (tmp_path / name).read_text().splitlines())
        steps[name] = values(rows, "train/step")
    assert steps == {"rows.jsonl": [1], "rows.1.jsonl": [1, 2, 3]}


class Halved:
    """A callback that adds a number to rows."""

    def on_step(self, trainer, metrics):
        metrics.numbers["own/half"] = metrics.decision.norm / 2


def test_a_number_that_a_callback_adds_stands_in_the_row():
    rows, trainer = logged(False, callbacks=[Halved()])
    trainer.fit()
    assert [row["own/half"] for row in rows] == [row["grad/norm"] / 2 for row in rows]


@pytest.mark.parametrize("continued", ["by the same monitor", "after a kill"])
def test_a_loop_that_goes_back_to_a_checkpoint_has_each_row_once(continued, tmp_path):
    file = tmp_path / "rows.jsonl"
    model = make_model()

    def steps(monitor, count):
        for _ in range(count):
            model(torch.ones(1, 4)).sum().backward()
            norm = norm_of(model)
            monitor.step(norm, threshold=norm, loss=0.1, samples=1)
            model.zero_grad()

    monitor = killed = GradientMonitor(model, file, interval=2, flush=3)
    steps(monitor, 5)
    torch.save(monitor.state_dict(), tmp_path / "checkpoint.pt")
    monitor.log({"eval/loss": 0.5})
    steps(monitor, 4)
    if continued == "after a kill":
        with file.open("ab") as torn:
            torn.write(b'{"train/step": 8, "gra')
        monitor = GradientMonitor(model, file, interval=2, flush=3)
    monitor.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    steps(monitor, 3)
    summary = monitor.close()
    rows = list(map(json.loads, file.read_text().splitlines()))
    assert values(rows, "train/step") == [2, 4, 5, 6, 8]
    assert [row.get("train/samples") for row in rows] == [2, 4, None, 6, 8]
    assert summary["steps"] == 8
    killed.close()  # the file, for this process


def test_the_noise_scale_is_that_of_a_known_distribution_without_a_wait():
    """Gradients are samples with unit variance in each of 60 elements, and a mean of 0.5."""
    torch.manual_seed(0)
    drawn = torch.randn(4 * 8 * 100, 60, dtype=torch.float64) + 0.5
    model = nn.Linear(60, 1, bias=False).double()
    criterion = Loss(lambda outputs, targets: outputs.mean(), items="samples")
    options = {"criterion": criterion, "accumulation_steps": 4}
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    options |= {"optimizers": sgd, "sinks": [Rows()]}
    loader = [(part, torch.zeros(len(part))) for part in drawn.split(8)]
    options["measurements"] = Measurements(noise_scale=True)
    trainer = trainer_of(model, loader, "100ba", **options)
    with kept_on_device(), Waits() as waits:
        trainer.fit()
    assert not waits.found
    assert options["sinks"][0].rows[-1]["noise/scale"] == pytest.approx(60 / (60 * 0.25), rel=0.05)
    with pytest.raises(ValueError, match="noise_scale needs two or more microbatches"):
        trainer_of(nn.Linear(60, 1), loader, measurements=options["measurements"])
    norm = torch.tensor(1e200, dtype=torch.float64)
    huge = noise_estimates(torch.ones(()), share=0.25, samples=32, norm=norm)
    assert [*huge.values()] == [-math.inf, math.inf]
