"""Optional measurements and layer norms on several ranks are those of plain PyTorch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.telemetry.options import Measurements
from tests.distributed.cases import MODELS, Case, trainer, uneven
from tests.distributed.test_collectives import Counting
from tests.distributed.training import Rows
from tests.on_device import call_kept_on_device
from tests.ranks import run_ranks
from tests.telemetry import by_hand

STEPS, WORST = 6, 3
SHARES = Measurements(worst_layers=WORST, update_ratio=True, clip_cosine=True)
ALL = replace(SHARES, noise_scale=True, spike_score=True, spike_sigma=1.0, spike_window=4)
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
    """Rows, summary, number of collectives, and the microbatches of each step on this rank.

    With a folder, half of the training is saved there, and another one continues from it.
    """
    rows, read = Rows(), []
    settings = {"per_layer": True, "measurements": options, "sinks": [rows], "log_flush": 4}
    first = case if folder is None else replace(case, steps=case.steps // 2)
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


def assert_by_hand(ranks: list[dict[str, Any]], case: Case) -> None:
    """That rows and summaries are those of plain PyTorch over the same microbatches."""
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    together = zip(*(rank["read"] for rank in ranks), strict=True)
    steps = [[batches for batches in step if batches] for step in together]
    wanted, run = by_hand.train(model, steps, CLIPS[case.mode], case.rate, WORST)
    names = [name for name, _ in model.named_parameters()]
    rows, summary = ranks[0]["rows"], ranks[0]["summary"]
    for row, expected in zip(rows, wanted, strict=True):
        keys = {k for k in expected if "/" in k}
        assert {k for k in row if k.startswith(MEASURED)} == keys
        for key in keys:
            assert row[key] == pytest.approx(expected[key], rel=1e-7), (row["train/step"], key)
        assert row["grad/norm"] == pytest.approx(expected["norm"], rel=1e-9)
    assert case.mode != "L2" or {row["clip/cosine"] for row in rows} == {1.0}
    assert summary["clip/longest_streak"] == run["clip/longest_streak"]
    for name in ("noise/microbatches", "noise/ranks"):
        assert (name in summary) == (name in run)
        if name in run:
            found = tuple(summary[name][key] for key in ("scale", "error", "steps"))
            assert found == pytest.approx(run[name], rel=1e-7)
    shares = {
        name: math.fsum((row[f"grad/norm/{name}"] / row["grad/norm"]) ** 2 for row in rows)
        / case.steps
        for name in names
    }
    worst = summary["grad/worst_layers"]
    order = sorted(shares, key=shares.__getitem__, reverse=True)[:WORST]
    assert [each["parameter"] for each in worst] == order
    for each in worst:
        assert each["share"] == pytest.approx(shares[each["parameter"]], rel=1e-7)
        assert each["largest_norm"] == max(row[f"grad/norm/{each['parameter']}"] for row in rows)
    for key, of in SCORES.items():
        scores = by_hand.spike_scores([row[of] for row in rows], 1.0, 4)
        assert [row[key] for row in rows] == scores
        assert summary[key] == scores[-1]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    left = ("time/", "throughput/", "eval/")
    return {key: repr(value) for key, value in row.items() if not key.startswith(left)}


def measure(asked: list[tuple[str, Case, str]]) -> list[list[dict[str, Any]]]:
    """Of each, a training, the same one with a stop in the middle, and one without measurements."""
    kinds = [(ALL, False), (ALL, True), (Measurements(), False)]
    return [
        [trained(plugin, case, options, folder if stops else None) for options, stops in kinds]
        for plugin, case, folder in asked
    ]


def test_two_ranks_measure_what_plain_pytorch_does(tmp_path):
    chosen = [("ddp", "tied", "value", 3), ("fsdp", "tied", "per_parameter", 3)]
    chosen += [("zero1", "conv", "L2", 1), ("fsdp", "conv", "value", 1)]
    asked = [
        (plugin, Case(model, mode, micros, steps=STEPS, rate=0.3), str(tmp_path / str(number)))
        for number, (plugin, model, mode, micros) in enumerate(chosen)
    ]
    ranks = run_ranks(measure, 2, asked)
    for number, (_, case, _) in enumerate(asked):
        found = [rank[number] for rank in ranks]
        assert_by_hand([whole for whole, *_ in found], case)
        assert not uneven([whole for whole, *_ in found])
        for whole, continued, plain in found:
            assert list(map(timeless, continued["rows"])) == list(map(timeless, whole["rows"]))
            for key in ("clip/longest_streak", "grad/worst_layers", "noise/ranks", *SCORES):
                assert continued["summary"].get(key) == whole["summary"].get(key)
            # Everything travels with the loss and with the norms of layers.
            assert whole["calls"] == plain["calls"]


SPLIT = {"tensor": "tied", "1f1b": "tied", "moe": "moe", "zero3": "gpt", "sequence": "gpt"}


def measure_split(asked: list[tuple[str, Case]]) -> list[list[dict[str, float]]]:
    """Rows of each training, as an accelerator computes them."""
    return [call_kept_on_device(trained, plugin, case, SHARES)["rows"] for plugin, case in asked]


def test_split_models_are_measured_as_in_one_process():
    asked = [
        (plugin, Case(model, mode, 2, steps=3))
        for plugin, model in SPLIT.items()
        for mode in ("adaptive", "value", "inf")
    ]
    ranks = run_ranks(measure_split, 2, asked)
    for number, (plugin, case) in enumerate(asked):
        wanted = trained(None, case, SHARES)["rows"]
        for rows in (rank[number] for rank in ranks):
            for row, expected in zip(rows, wanted, strict=True):
                keys, ours = (
                    {k for k in each if k.startswith((*MEASURED, "grad/norm/"))}
                    for each in (expected, row)
                )
                assert keys == ours, plugin
                # The gradient of a key's bias is zero but for rounding.
                for key in (key for key in keys if not key.endswith("key.bias")):
                    close = pytest.approx(expected[key], rel=1e-8, abs=1e-12)
                    assert row[key] == close, (plugin, key)


FLUSHED = {"ddp": 1, "fsdp": 2, "zero1": 2, "tensor": 1, "1f1b": 2}
"""Collectives of a flush: one for the loss, where data is divided or the loss is another rank's; one
for the norms of a model that no rank has all gradients of.
"""


def flushes() -> dict[str, list[int]]:
    """Collectives of each flush of the meter."""
    found = {}
    for plugin in FLUSHED:
        options = {"per_layer": True, "log_interval": 2, "log_flush": 4, "sinks": [Rows()]}
        made = trainer(Case("tied", "L2", 2, steps=8), plugin, **options)
        calls, meter = [], made.state.meter

        def counted(
            *args: Any, flush: Any = meter.flush, calls: list[int] = calls, **options: Any
        ) -> None:
            with Counting() as counter:
                flush(*args, **options)
            calls.append(counter.calls.total())

        meter.flush = counted  # type: ignore[method-assign]
        made.fit()
        found[plugin] = calls
    return found


def test_a_flush_has_a_collective_for_all_layer_norms():
    wanted = {plugin: [number] * 2 for plugin, number in FLUSHED.items()}
    assert run_ranks(flushes, 2) == [wanted] * 2
