"""Interleaved rounds, spreads of ratios, and the rows that show them."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from runner.bench.pairs import Spread, added, interleave, ratio
from runner.bench.parallel import PLUGINS, stand_ins_of
from runner.bench.subjects import Small, Subject, gpt
from runner.bench.table import Row, compared
from runner.booster import Booster
from runner.clip import build, total_norm
from tests.ranks import run_ranks


def test_every_round_times_each_side_once_and_begins_with_another_one():
    calls = []

    def side(name):
        return lambda: calls.append(name) or float(len(calls))

    times = interleave({"a": side("a"), "b": side("b"), "c": side("c")}, rounds=3, warm_up=1)
    assert calls == [*"abc", *"bca", *"cab", *"abc"]
    assert times == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}


@pytest.mark.parametrize("number", [1, 2, 5, 15])
def test_a_spread_has_the_quartiles_of_numpy(number):
    values = np.random.default_rng(number).normal(size=number)
    low, median, high = np.percentile(values, (25, 50, 75))
    assert Spread.of(values.tolist()) == pytest.approx((median, low, high, number))


def test_ratios_are_taken_within_a_round():
    # The machine is three times slower in the second round.
    assert ratio([2.0, 6.0, 2.0], [4.0, 12.0, 4.0]) == (0.5, 0.5, 0.5, 3)
    assert added([3.0, 9.0], [5.0, 15.0], [1.0, 3.0]) == (0.5, 0.5, 0.5, 2)
    # A round in which the bare side was slower says nothing.
    assert added([3.0, 2.0, 3.0], [5.0, 1.0, 5.0], [1.0, 1.5, 1.0]).number == 2
    assert added([3.0], [1.0], [2.0]) == (1.0, 1.0, 1.0, 1)


def test_a_row_reads_as_one_line_and_is_recorded_with_all_its_numbers():
    times = {"step": [1.0, 1.0], "torch": [3.0, 3.0], "ours": [2.0, 2.0]}
    row = compared("resnet34", times, "ours", "torch", 0.5, bare="step", steps=100)
    words = ["resnet34", "0.50", "0.50", "-", "0.50", "0.50"]
    assert row.line().split() == [*words, "step", "10.00", "torch", "30.00", "ours", "20.00"]
    assert "0.60 missed" in compared("", times, "ours", "torch", 0.6).line()
    error = Row("error", Spread.of([3e-8]), 1e-6, "error")
    assert "3e-08" in error.line()
    wanted = {"what": "error", "unit": "error", "limit": 1e-6, "rounds": 1, "ms": {}}
    wanted |= dict.fromkeys(("median", "q1", "q3"), 3e-8)
    assert json.loads(json.dumps(error.record())) == wanted


def test_gradients_are_restored_before_each_timed_part():
    subject, seen = Subject("small", Small(5), "cpu"), []

    def work():
        seen.append(torch.cat(subject.gradients))
        for gradient in subject.gradients:
            gradient.zero_()

    assert subject.side(work)() > 0
    assert len(seen) == 3  # short work is done three times
    for each in seen:
        norm = float(np.linalg.norm(each.double().numpy()))
        assert subject.norm == pytest.approx(norm, rel=1e-14) != 0


def clipped():
    """For each plugin ‖G‖ by this project and by torch, and how far clipped gradients are apart."""
    found = []
    for make in PLUGINS.values():
        torch.manual_seed(0)
        model = gpt(2, 64, heads=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = Booster(plugin=make()).boost(model, optimizer)[1].layout
        torch.manual_seed(1)
        stand_ins = stand_ins_of(layout)
        own = float(total_norm(layout))
        kept = [each.grad.to_local().clone() for each in stand_ins]
        torchs = nn.utils.clip_grad_norm_(stand_ins, 0.5 * own, foreach=True).full_tensor().item()
        theirs = [each.grad.to_local().clone() for each in stand_ins]
        for stand_in, gradient in zip(stand_ins, kept, strict=True):
            stand_in.grad.to_local().copy_(gradient)
        with torch.no_grad():
            build("norm", threshold=0.5 * own).clip(layout)
        pairs = zip(layout.shards, theirs, strict=True)
        worst = max((s.gradient - t).abs().max().item() for s, t in pairs if t.numel())
        found.append((own, torchs, worst))
    return found


def test_what_torch_clips_in_the_table_of_ranks_are_the_same_gradients():
    for rank in run_ranks(clipped, 4):
        assert len(rank) == 3
        for own, torchs, worst in rank:
            assert torchs == pytest.approx(own, rel=1e-5)
            assert worst < 1e-8
