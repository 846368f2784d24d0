"""Optional measurements of a training are those of plain PyTorch, on one rank and on several."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.telemetry.options import Measurements
from tests.distributed.cases import MODELS, TIMES, Case, trainer, uneven
from tests.distributed.test_collectives import Counting
from tests.distributed.training import Rows
from tests.on_device import call_kept_on_device
from tests.ranks import run_ranks
from tests.telemetry import by_hand

STEPS, WORST = 6, 3
ALL = Measurements(
    worst_layers=WORST,
    update_ratio=True,
    clip_cosine=True,
    noise_scale=True,
    spike_score=True,
    spike_sigma=1.0,
    spike_window=4,
)
SCORES = {"train/loss_spike_score": "train/loss", "grad/norm_spike_score": "grad/norm"}
MEASURED = ("grad/share/", "update/", "noise/", "clip/cosine")
CLIPS = {
    "L2": by_hand.by_norm(0.05),
    "value": by_hand.by_value(0.003),
    "per_parameter": by_hand.by_tensor(0.02),
}


def trained(
    plugin: str | None, case: Case, options: Measurements, folder: str | None = None
) -> dict[str, Any]:
    """Rows, summary, and the microbatches of each step on this rank.

    Args:
        plugin: see :func:`tests.distributed.cases.trainer`.
        case: what is trained.
        options: what is measured.
        folder: where to save half of the training, from which another one continues.
    """
    rows, read = Rows(), []
    settings = {"per_layer": True, "measurements": options, "sinks": [rows], "log_flush": 4}
    half = case.steps // 2
    first = case if folder is None else replace(case, steps=half)
    made = trainer(first, plugin, **settings)
    accumulate = made.passes.accumulate

    def noted(batches: Any, counts: Any, *others: Any) -> Any:
        own = zip(batches, counts, strict=True)
        read.append([tuple(map(torch.clone, batch)) for batch, count in own if count is not None])
        return accumulate(batches, counts, *others)

    made.passes.accumulate = noted  # type: ignore[method-assign]
    with Counting() as counter:
        summary = made.fit()
    if folder is not None:
        path = made.save(folder)
        made = trainer(case, plugin, **settings)
        made.load(path)
        summary = made.fit()
    return {"rows": rows.rows, "summary": summary, "read": read, "calls": counter.calls.total()}


def measure(asked: Sequence[tuple[str | None, Case, str]]) -> list[list[dict[str, Any]]]:
    """Of each, a training, the same one with a stop in the middle, and one without measurements."""
    return [
        [
            trained(plugin, case, ALL),
            trained(plugin, case, ALL, folder),
            trained(plugin, case, Measurements()),
        ]
        for plugin, case, folder in asked
    ]


def assert_by_hand(ranks: list[dict[str, Any]], case: Case) -> None:
    """That rows and summaries are those of plain PyTorch over the same microbatches."""
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    together = zip(*(rank["read"] for rank in ranks), strict=True)
    steps = [[batches for batches in step if batches] for step in together]
    wanted, run = by_hand.train(model, steps, CLIPS[case.mode], case.rate, WORST)
    names = [name for name, _ in model.named_parameters()]
    for rank in ranks:
        for row, expected in zip(rank["rows"], wanted, strict=True):
            keys = {k for k in expected if "/" in k}
            ours = {k for k in row if k.startswith(MEASURED)}
            assert ours == keys, row["train/step"]
            for key in keys:
                assert row[key] == pytest.approx(expected[key], rel=1e-7), (row["train/step"], key)
            assert row["grad/norm"] == pytest.approx(expected["norm"], rel=1e-9)
        if case.mode == "L2":
            assert {row["clip/cosine"] for row in rank["rows"]} == {1.0}
        summary = rank["summary"]
        assert summary["clip/longest_streak"] == run["clip/longest_streak"]
        for name in ("noise/microbatches", "noise/ranks"):
            assert (name in summary) == (name in run)
            if name in run:
                found = tuple(summary[name][key] for key in ("scale", "error", "steps"))
                assert found == pytest.approx(run[name], rel=1e-7)
        worst = summary["grad/worst_layers"]
        shares = {
            name: math.fsum(
                row[f"grad/norm/{name}"] ** 2 / row["grad/norm"] ** 2 for row in rank["rows"]
            )
            / case.steps
            for name in names
        }
        order = sorted(shares, key=shares.__getitem__, reverse=True)[:WORST]
        assert [each["parameter"] for each in worst] == order
        for each in worst:
            assert each["share"] == pytest.approx(shares[each["parameter"]], rel=1e-7)
            norms = [row[f"grad/norm/{each['parameter']}"] for row in rank["rows"]]
            assert each["largest_norm"] == max(norms)
        for key, of in SCORES.items():
            scores = by_hand.spike_scores([row[of] for row in rank["rows"]], 1.0, 4)
            assert [row[key] for row in rank["rows"]] == scores
            assert summary[key] == scores[-1]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    left = ("time/", "throughput/", "eval/")
    return {key: repr(value) for key, value in row.items() if not key.startswith(left)}


def assert_goes_on(whole: dict[str, Any], continued: dict[str, Any]) -> None:
    """That a training which stopped in the middle has the same rows and the same summary."""
    assert list(map(timeless, continued["rows"])) == list(map(timeless, whole["rows"]))
    for key in ("clip/longest_streak", "grad/worst_layers", "train/loss_spike_score"):
        assert continued["summary"][key] == whole["summary"][key]
    for key in ("noise/microbatches", "noise/ranks"):
        assert continued["summary"].get(key) == whole["summary"].get(key)


@pytest.mark.parametrize("mode", CLIPS)
def test_one_process(mode, tmp_path):
    case = Case("tied", mode, 3, steps=STEPS, rate=0.3)
    [[whole, continued, plain]] = measure([(None, case, str(tmp_path))])
    assert_by_hand([whole], case)
    assert_goes_on(whole, continued)
    for row, without in zip(whole["rows"], plain["rows"], strict=True):
        assert without.items() - row.items() <= {(k, without[k]) for k in TIMES}
    kept = call_kept_on_device(trained, None, case, ALL)
    assert_by_hand([kept], case)


TWO_RANKS = [("ddp", "tied", "value", 3), ("fsdp", "tied", "per_parameter", 3)]
TWO_RANKS += [("zero1", "conv", "L2", 1), ("fsdp", "conv", "value", 1)]


def test_two_ranks(tmp_path):
    asked = [
        (
            plugin,
            Case(model, mode, accumulation, steps=STEPS, rate=0.3),
            str(tmp_path / str(number)),
        )
        for number, (plugin, model, mode, accumulation) in enumerate(TWO_RANKS)
    ]
    ranks = run_ranks(measure, 2, asked)
    for number, (_, case, _) in enumerate(asked):
        found = [rank[number] for rank in ranks]
        assert_by_hand([whole for whole, *_ in found], case)
        assert not uneven([whole for whole, *_ in found])
        for whole, continued, plain in found:
            assert_goes_on(whole, continued)
            # Everything travels with the loss and with the norms of layers.
            assert whole["calls"] == plain["calls"]


SPLIT = {"tensor": "tied", "1f1b": "tied", "moe": "moe", "zero3": "gpt", "sequence": "gpt"}
SHARES = Measurements(worst_layers=WORST, update_ratio=True, clip_cosine=True)


def measure_split(asked: Sequence[tuple[str | None, Case]]) -> list[list[dict[str, float]]]:
    """Rows of each training, as an accelerator computes them."""
    return [call_kept_on_device(trained, plugin, case, SHARES)["rows"] for plugin, case in asked]


@pytest.mark.parametrize("mode", ["adaptive", "value"])
def test_split_models_are_measured_as_in_one_process(mode):
    asked = [(plugin, Case(model, mode, 2, steps=3)) for plugin, model in SPLIT.items()]
    ranks = run_ranks(measure_split, 2, asked)
    for number, (plugin, case) in enumerate(asked):
        wanted = trained(None, case, SHARES)["rows"]
        for rows in (rank[number] for rank in ranks):
            for row, expected in zip(rows, wanted, strict=True):
                keys = {k for k in expected if k.startswith(MEASURED)}
                assert keys == {k for k in row if k.startswith(MEASURED)}, plugin
                # The gradient of a key's bias is zero but for rounding.
                for key in (key for key in keys if not key.endswith("key.bias")):
                    close = pytest.approx(expected[key], rel=1e-8, abs=1e-12)
                    assert row[key] == close, (plugin, key)
