"""Optional measurements where something is special: bad steps, frozen parameters, Muon, fp16."""

import math
import random
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Trainer
from runner.booster import Booster, LossScale, SinglePlugin
from runner.clip import build
from runner.clip.direction import cosine
from runner.optim.muon import muon_with_adamw
from runner.telemetry.noise_scale import NoiseScale
from runner.telemetry.options import Measurements
from runner.telemetry.spike_score import SpikeScore
from runner.telemetry.statistics import Statistics
from runner.telemetry.step import StepValues
from runner.telemetry.worst_layers import WorstLayers
from tests.distributed.training import Rows
from tests.on_device import Waits, kept_on_device
from tests.telemetry import by_hand


class Net(nn.Module):
    """A network with a frozen layer, and one that takes no part in the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, inputs):
        return self.last(self.frozen(self.first(inputs).tanh()).tanh())


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


def batches(count, dtype=torch.float64, bad=()):
    drawn = torch.Generator().manual_seed(4)
    for number in range(count):
        inputs = torch.randn(4, 6, generator=drawn, dtype=torch.float64).to(dtype)
        if number in bad:
            inputs[1, 2] = math.inf
        yield inputs, inputs[:, :3].nan_to_num(posinf=0.0).argmax(1)


def trained(options, *, mode=("value", 0.02), count=12, bad=(), model=None, **further):
    rows, made = Rows(), network() if model is None else model
    settings = {"optimizers": torch.optim.SGD(made.parameters(), lr=0.5), "accumulation_steps": 2}
    trainer = Trainer(
        made,
        list(batches(count, next(made.parameters()).dtype, bad)),
        f"{count // 2}ba",
        build(mode[0], threshold=mode[1]),
        measurements=options,
        sinks=[rows],
        **settings | further,
    )
    return rows.rows, trainer.fit()


ALL = Measurements(3, True, True, True, True, spike_sigma=0.3, spike_window=4)


@pytest.mark.parametrize("device", [False, True])
def test_bad_steps_frozen_and_unused_parameters(device):
    bad = 5  # the second microbatch of step 3
    if device:
        model = network()
        fused = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.5, fused=True)}
        with kept_on_device():
            rows, summary = trained(ALL, bad=[bad], model=model, per_layer=True, **fused)
    else:
        rows, summary = trained(ALL, bad=[bad], per_layer=True)
    read = list(batches(12))
    steps = [[read[at : at + 2]] for at in range(0, 12, 2)]
    good = [number for number in range(6) if number != bad // 2]
    wanted, run = by_hand.train(
        network(), [steps[number] for number in good], by_hand.by_value(0.02), 0.5, 3
    )
    for number, expected in zip(good, wanted, strict=True):
        row = rows[number]
        for key in (key for key in expected if "/" in key):
            assert row[key] == pytest.approx(expected[key], rel=1e-7), (number, key)
        updated = {key.removeprefix("update/ratio/") for key in row if key.startswith("update/rat")}
        names = {f"{layer}.{part}" for layer in ("first", "last") for part in ("weight", "bias")}
        unused = {"unused.weight", "unused.bias"}
        assert updated == names | unused | {"update/ratio"}
        assert {row[f"update/ratio/{name}"] for name in unused} == {0.0}
    skipped = rows[bad // 2]
    assert "clip/cosine" not in skipped
    assert not [key for key in skipped if key.startswith("grad/share/")]
    assert skipped["update/ratio"] == 0.0
    scale, error, count = run["noise/microbatches"]
    assert summary["noise/microbatches"] == pytest.approx(
        {"scale": scale, "error": error, "steps": count}, rel=1e-7
    )
    assert count == len(good)
    norms = [row["grad/norm"] for row in rows]
    assert not math.isfinite(norms[bad // 2])
    found = [row["grad/norm_spike_score"] for row in rows]
    assert found == by_hand.spike_scores(norms, 0.3, 4)
    assert found[-1] > 0


@pytest.mark.parametrize("mode", [("value", 0.02), ("per_parameter", 0.02), ("norm", 0.02)])
def test_the_host_waits_for_no_measurement(mode):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    with kept_on_device(), Waits() as waits:
        rows, _ = trained(ALL, mode=mode, model=model, per_layer=True, optimizers=optimizer)
    assert "clip/cosine" in rows[-1]
    assert not waits.found


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_noise_and_direction_do_not_depend_on_the_norm_that_is_clipped(norm_type):
    options = Measurements(clip_cosine=True, noise_scale=True)
    wanted, _ = trained(options, mode=("value", 0.02))
    rows = Rows()
    model = network()
    Trainer(
        model,
        list(batches(12)),
        "6ba",
        build("value", threshold=0.02, norm_type=norm_type),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        accumulation_steps=2,
        measurements=options,
        sinks=[rows],
    ).fit()
    for row, expected in zip(rows.rows, wanted, strict=True):
        for key in ("clip/cosine", "noise/microbatches/scale", "noise/microbatches/error"):
            assert row.get(key) == pytest.approx(expected.get(key), rel=1e-9)


def test_the_loss_scale_of_fp16_cancels():
    options = Measurements(noise_scale=True)
    plain, _ = trained(options, mode=("norm", 0.5), model=network(torch.float32))
    scaled, _ = trained(
        options,
        mode=("norm", 0.5),
        model=network(torch.float32),
        precision="fp16",
        loss_scale=LossScale(256.0),
    )
    for row, expected in zip(scaled[1:], plain[1:], strict=True):
        key = "noise/microbatches/scale"
        assert row[key] == pytest.approx(expected[key], rel=0.1)


def sums_of(before, after):
    b, a = (torch.cat([g.double().flatten() for g in each]) for each in (before, after))
    return float(b @ a / (b.norm() * a.norm()))


class Modes:
    """Modes that turn the gradient, and modes that do not."""

    TURN: ClassVar = {
        "value": ("value", {"threshold": 0.3}),
        "adaptive": ("adaptive", {"threshold": 0.05, "exclude": []}),
        "per_parameter": ("per_parameter", {"threshold": 0.5}),
        "chain": ("chain", {"links": [0.5, {"mode": "value", "threshold": 0.02}]}),
        "chain of norms": ("chain", {"links": [2.0, {"mode": "per_parameter", "threshold": 0.1}]}),
        "groups": ("groups", {"groups": {"first*": 0.1, "*": "none"}}),
    }
    KEEP: ClassVar = {
        "none": ("none", {}),
        "norm": ("norm", {"threshold": 0.5}),
        "chain of one": ("chain", {"links": [0.5]}),
    }


def clipped(name, options, fused=False, device=False):
    """Gradients before and after, and the cosine that was measured."""
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    model, wrapped, *_ = Booster().boost(model, optimizer)
    inputs, targets = next(batches(1, torch.float32))
    wrapped.backward(30.0 * F.cross_entropy(model(inputs), targets))
    before = [g.clone() for g in wrapped.layout.gradients()[1]]
    mode = build(name, **options)
    mode.bind(wrapped.layout)
    if device:
        with kept_on_device():
            wrapped.clip(mode, fold=True, direction=True)
    else:
        wrapped.clip(mode, fold=True, direction=True)
    sums = wrapped.direction
    wrapped.step()
    return before, wrapped.layout.gradients()[1], sums


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("name", Modes.TURN)
def test_the_cosine_of_every_kind_of_mode(name, device):
    kind, options = Modes.TURN[name]
    before, after, sums = clipped(kind, options, fused=True, device=device)
    wanted = sums_of(before, after)
    assert wanted < 0.999
    assert cosine(sums.tolist()) == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("name", Modes.KEEP)
def test_one_coefficient_keeps_the_direction(name):
    kind, options = Modes.KEEP[name]
    before, after, sums = clipped(kind, options, fused=True)
    assert cosine(sums.tolist()) == 1.0
    assert sums_of(before, after) == pytest.approx(1.0, abs=1e-7)


def test_muon_turns_a_gradient_whose_other_part_is_scaled():
    class Hidden(nn.Sequential):
        pass

    torch.manual_seed(0)
    model = Hidden(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs, targets = next(batches(1))
    loss = F.cross_entropy(model(inputs), targets)
    named = dict(model.named_parameters())
    found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    rest = {name for name in named if named[name].ndim < 2 or name == "4.weight"}
    norm = math.sqrt(by_hand.square({name: found[name] for name in rest}))
    after = {name: g * (0.01 / norm if name in rest else 1.0) for name, g in found.items()}
    rows = Rows()
    Trainer(
        model,
        [(inputs, targets)],
        "1ba",
        build("norm", threshold=0.01),
        optimizers=muon_with_adamw(model, heads=["4.weight"]),
        measurements=Measurements(clip_cosine=True),
        sinks=[rows],
    ).fit()
    [row] = rows.rows
    assert row["grad/norm_scaled"] == pytest.approx(norm, rel=1e-9)
    wanted = sums_of(found.values(), after.values())
    assert wanted < 0.999
    assert row["clip/cosine"] == pytest.approx(wanted, rel=1e-9)


def test_the_noise_scale_is_near_the_true_one():
    """Gradients of known mean and covariance: the true scale is within four standard errors."""
    drawn = random.Random(5)
    dims, sigma, size, parts = 40, 2.0, 3, 4
    mean = [0.5] * dims
    scale, measured = NoiseScale(), 400
    for _ in range(measured):
        cells = [[m + drawn.gauss(0, sigma / math.sqrt(size)) for m in mean] for _ in range(parts)]
        whole = [sum(column) / parts for column in zip(*cells, strict=True)]
        squares = sum(v * v for cell in cells for v in cell) / parts
        scale.add([squares, math.nan, sum(v * v for v in whole), parts, 1, size * parts])
    found = scale.summary()["noise/microbatches"]
    true = dims * sigma**2 / sum(m * m for m in mean)
    assert found["steps"] == measured
    assert 0 < found["error"] < 0.1 * true
    assert abs(found["scale"] - true) < 4 * found["error"]


def values(norm, clipped):
    return StepValues(1.0, norm, norm, 1.0, float(clipped), 0.0, norm, 1.0)


def test_streaks_scores_and_noise_go_on_from_any_step():
    options = Measurements(noise_scale=True, spike_score=True, spike_sigma=2.0, spike_window=6)
    drawn = random.Random(1)
    steps = []
    for _ in range(60):
        norm = drawn.choice([*[drawn.lognormvariate(0, 0.3)] * 9, math.nan, 40.0])
        noise = [drawn.uniform(2, 3), math.nan, drawn.uniform(1, 2), 4.0, 1.0, 8.0]
        steps.append((values(norm, drawn.random() < 0.7), drawn.gauss(3, 1), noise))
    whole = Statistics(options)
    rows = []
    for step in steps:
        whole.count(*step)
        rows.append(whole.row())
    for stop in (1, 17, 40):
        first, second = Statistics(options), Statistics(options)
        for step in steps[:stop]:
            first.count(*step)
        second.load_state_dict(first.state_dict())
        for step, wanted in zip(steps[stop:], rows[stop:], strict=True):
            second.count(*step)
            assert second.row() == wanted
        assert second.summary() == whole.summary()
        assert repr(second.state_dict()) == repr(whole.state_dict())
    longest = run = 0
    for step, *_ in steps:
        run = run + 1 if step.clipped else 0
        longest = max(longest, run)
    assert whole.summary()["clip/longest_streak"] == longest
    norms = [step.norm for step, *_ in steps]
    assert [row["grad/norm_spike_score"] for row in rows] == by_hand.spike_scores(norms, 2.0, 6)


def test_a_level_that_never_moves_has_no_spikes_and_one_jump_is_one():
    score = SpikeScore(6.0, 8)
    for value in [2.0] * 20:
        score.add(value)
    assert score.score == 0.0
    score.add(2.5)
    assert score.score == pytest.approx(1 / 21)


def test_what_is_not_possible_is_refused():
    model = network()
    with pytest.raises(ValueError, match="worst_layers needs a norm with shares"):
        Trainer(
            model,
            [],
            algorithms=build("norm", threshold=1.0, norm_type=math.inf),
            measurements=Measurements(worst_layers=2),
        )

    class Split(SinglePlugin):
        world_size, data_size = 2, 1

    with pytest.raises(ValueError, match="no tensor, pipeline or expert parallelism"):
        Trainer(network(), [], plugin=Split(), measurements=Measurements(noise_scale=True))


def test_worst_layers_of_equal_shares_come_in_the_order_of_the_model():
    worst = WorstLayers(["a", "b", "c"], 2, 2.0)
    found = worst.row([3.0, 4.0, 3.0])
    assert found == pytest.approx({"grad/share/b": 16 / 34, "grad/share/a": 9 / 34})
    assert worst.row([0.0, 0.0, 0.0]) == worst.row([math.nan, 1.0, 1.0]) == {}
    first, second = worst.summary()
    assert (first["parameter"], first["first"], first["largest_norm"]) == ("b", 1.0, 4.0)
    assert (second["parameter"], second["first"]) == ("a", 0.0)
