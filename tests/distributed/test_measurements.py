"""Optional measurements and layer norms on several ranks are those of plain PyTorch."""

from typing import Any

import pytest
import torch

from runner import Measurements
from tests.distributed.cases import FAMILIES, MODELS, Case, trainer, uneven
from tests.distributed.test_collectives import Counting
from tests.distributed.training import Rows
from tests.ranks import run_ranks
from tests.telemetry import by_hand

STEPS = 6
MEASURED = ("update/", "noise/", "grad/zeros")
TOP = "grad/top/"
ASKED = {
    ("ddp", Case("tied", "value", 3, steps=STEPS, rate=0.3)): by_hand.by_value(0.003),
    ("fsdp", Case("tied", "per_parameter", 3, steps=STEPS, rate=0.3)): by_hand.by_tensor(0.02),
    ("zero1", Case("conv", "L2", 1, steps=STEPS, rate=0.3)): by_hand.by_norm(0.05),
}


def trained(plugin: str | None, case: Case, options: Measurements) -> dict[str, Any]:
    """Rows, summary, number of collectives, and the microbatches of each step on this rank."""
    rows = Rows()
    read = []
    settings = {
        "per_layer": True,
        "top": 3,
        "measurements": options,
        "sinks": [rows],
        "log_flush": 4,
    }
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
        expected = {key: value for key, value in expected.items() if not key.startswith(TOP)}
        if not whole:
            expected.pop("noise/scale", None)
        assert measured == pytest.approx({k: expected[k] for k in expected if "/" in k}, rel=1e-7)
        assert row["grad/norm"] == pytest.approx(expected["norm"], rel=1e-9)


def measure() -> list[list[dict[str, Any]]]:
    """Of each, a training with measurements, and one without."""
    measured = []
    for plugin, case in ASKED:
        every = Measurements(update_ratio=True, noise_scale=plugin == "ddp", zeros=True)
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


def dominate() -> dict[str, dict[str, Any]]:
    """A training under each kind of plugin whose threshold clips every step."""
    cases = {plugin: Case(model, "L2", steps=3, rate=0.3) for plugin, model in FAMILIES[2].items()}
    return {plugin: trained(plugin, case, Measurements()) for plugin, case in cases.items()}


@pytest.fixture(scope="module")
def dominated() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(dominate, 2)


@pytest.mark.parametrize("plugin", FAMILIES[2])
def test_a_clipped_step_names_who_makes_most_of_the_gradient(plugin: str, dominated: Any) -> None:
    ranks = [of_rank[plugin] for of_rank in dominated]
    torch.manual_seed(0)
    model = MODELS[FAMILIES[2][plugin]]().double()
    together = zip(*(rank["read"] for rank in ranks), strict=True)
    steps = [[batches for batches in step if batches] for step in together]
    by_torch = by_hand.train(model, steps, by_hand.by_norm(0.05), 0.3)
    for row, expected in zip(ranks[0]["rows"], by_torch, strict=True):
        shares = {key: share for key, share in row.items() if key.startswith(TOP)}
        named = {key: share for key, share in expected.items() if key.startswith(TOP)}
        assert shares == pytest.approx(named, abs=1e-6), row["train/step"]
