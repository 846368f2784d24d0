"""Optional measurements and layer norms on several ranks are those of plain PyTorch."""

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


def trained(plugin: str | None, case: Case, options: Measurements) -> dict[str, Any]:
    """Rows, summary, number of collectives, and the microbatches of each step on this rank."""
    rows = Rows()
    read = []
    settings = {"per_layer": True, "measurements": options, "sinks": [rows], "log_flush": 4}
    training = trainer(case, plugin, **settings)
    accumulate = training.passes.accumulate

    def noted(batches: Any, counts: Any, *others: Any) -> Any:
        counted = zip(batches, counts.items, strict=True)
        read.append(
            [tuple(map(torch.clone, batch)) for batch, count in counted if count is not None]
        )
        return accumulate(batches, counts, *others)

    training.passes.accumulate = noted  # type: ignore[method-assign]
    with Counting() as counter:
        summary = training.fit()
    return {"rows": rows.rows, "summary": summary, "read": read, "calls": counter.calls.total()}


def assert_by_hand(ranks: list[dict[str, Any]], case: Case, clip: Any, whole: bool) -> None:
    """That rows and summaries are those of plain PyTorch over the same microbatches.

    Ranks that have the ``whole`` gradient of their samples measure its noise scale too.
    """
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.dtype)
    together = zip(*(rank["read"] for rank in ranks), strict=True)
    steps = [[batches for batches in step if batches] for step in together]
    by_torch = by_hand.train(model, steps, clip, case.rate)
    for row, expected in zip(ranks[0]["rows"], by_torch, strict=True):
        measured = {key: value for key, value in row.items() if key.startswith(MEASURED)}
        if not whole:
            expected.pop("noise/scale", None)
        assert measured == pytest.approx({k: expected[k] for k in expected if "/" in k}, rel=1e-7)
        assert row["grad/norm"] == pytest.approx(expected["norm"], rel=1e-9)


def measure() -> list[list[dict[str, Any]]]:
    """Of each, a training with measurements, and one without."""
    measured = []
    for plugin, case in ASKED:
        every = Measurements(update_ratio=True, noise_scale=plugin == "ddp")
        measured.append([trained(plugin, case, options) for options in (every, Measurements())])
    return measured


def test_two_ranks_measure_what_plain_pytorch_does():
    ranks = run_ranks(measure, 2)
    for number, ((plugin, case), clip) in enumerate(ASKED.items()):
        wholes = [rank[number][0] for rank in ranks]
        assert_by_hand(wholes, case, clip, plugin == "ddp")
        assert not uneven(wholes), (plugin, case)
        for whole, plain in (rank[number] for rank in ranks):
            # Everything travels with the loss and with the norms of layers.
            assert whole["calls"] == plain["calls"]
