"""Optional measurements and layer norms on several ranks are those of plain PyTorch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runner import Measurements
from tests.distributed.cases import MODELS, Case, trainer, uneven
from tests.distributed.test_collectives import Counting
from tests.distributed.training import Rows
from tests.ranks import run_ranks
from tests.telemetry import by_hand

STEPS = 6
MEASURED = ("update/", "noise/")
ASKED = {
    ("ddp", Case("tied", "value", 3, steps=STEPS, rate=0.3)): by_hand.by_value(0.003),
    ("fsdp", Case("tied", "per_parameter", 3, steps=STEPS, rate=0.3)): by_hand.by_tensor(0.02),
    ("zero1", Case("conv", "L2", 1, steps=STEPS, rate=0.3)): by_hand.by_norm(0.05),
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


def assert_by_hand(ranks: list[dict[str, Any]], case: Case, clip: Any, whole: bool) -> None:
    """That rows and summaries are those of plain PyTorch over the same microbatches.

    Ranks that have the ``whole`` gradient of their samples measure its noise scale too.
    """
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    together = zip(*(rank["read"] for rank in ranks), strict=True)
    steps = [[batches for batches in step if batches] for step in together]
    wanted, run = by_hand.train(model, steps, clip, case.rate)
    rows, summary = ranks[0]["rows"], ranks[0]["summary"]
    for row, expected in zip(rows, wanted, strict=True):
        measured = {key: value for key, value in row.items() if key.startswith(MEASURED)}
        if not whole:
            expected.pop("noise/scale", None)
        assert measured == pytest.approx({k: expected[k] for k in expected if "/" in k}, rel=1e-7)
        assert row["grad/norm"] == pytest.approx(expected["norm"], rel=1e-9)
    assert summary["clip/longest_streak"] == run["clip/longest_streak"]


def measure(folder: str) -> list[list[dict[str, Any]]]:
    """Of each, a training, the same one with a stop in the middle, and one without measurements."""
    found = []
    for plugin, case in ASKED:
        every = Measurements(update_ratio=True, noise_scale=plugin == "ddp")
        kinds = [(every, None), (every, f"{folder}/{plugin}"), (Measurements(), None)]
        found.append([trained(plugin, case, *each) for each in kinds])
    return found


def without_evaluation(result: dict[str, Any]) -> dict[str, Any]:
    return {"rows": [{k: v for k, v in r.items() if "eval/" not in k} for r in result["rows"]]}


def test_two_ranks_measure_what_plain_pytorch_does(tmp_path):
    ranks = run_ranks(measure, 2, str(tmp_path))
    for number, ((plugin, case), clip) in enumerate(ASKED.items()):
        wholes = [rank[number][0] for rank in ranks]
        assert_by_hand(wholes, case, clip, plugin == "ddp")
        assert not uneven(wholes)
        for whole, continued, plain in (rank[number] for rank in ranks):
            assert not uneven([without_evaluation(each) for each in (whole, continued)])
            key = "clip/longest_streak"
            assert continued["summary"][key] == whole["summary"][key]
            # Everything travels with the loss and with the norms of layers.
            assert whole["calls"] == plain["calls"]
