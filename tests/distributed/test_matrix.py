"""Under every plugin the step is that of one process: ‖G‖, clipped gradients, weights, counts.

Batches do not divide evenly; there are 17 tokens, 5 experts and 12 columns.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.cases import (
    FAMILIES,
    MODES,
    OF_ADAMW,
    Case,
    alone,
    differences,
    train_all,
)
from tests.ranks import run_ranks

ANY = ("tied", "conv", "gpt")
"""Models of plugins under which a rank has whole layers, whatever they are."""

CHAINS = ("gpt", "tied", "moe")
"""Models that have a plan of their own for tensor parallelism, and that can be cut."""

MATRIX: dict[tuple[str, int], Sequence[str]] = {
    ("ddp", 2): ANY,
    ("fsdp", 2): ANY,
    ("fsdp_gathered", 2): ANY,
    ("zero1", 2): ANY,
    ("zero2", 2): ANY,
    ("zero3", 2): ANY,
    ("tensor", 2): CHAINS,
    ("sequence", 2): CHAINS,
    ("gpipe", 2): CHAINS,
    ("1f1b", 2): CHAINS,
    ("interleaved", 2): CHAINS,
    ("zero_bubble", 2): CHAINS,
    ("moe", 2): ("moe",),
    ("hsdp", 4): ANY,
    ("tensor_dp", 4): ("tied",),
    ("pipeline_dp", 4): ("moe",),
    ("interleaved_dp", 4): ("tied",),
    ("zero_bubble_dp", 4): ("gpt",),
    ("moe_dp", 4): ("moe",),
    ("moe_zero1", 4): ("moe",),
    ("moe_zero3", 4): ("moe",),
    ("hybrid", 4): CHAINS,
    ("hybrid_zero1", 4): CHAINS,
    ("hybrid_zero2", 4): CHAINS,
    ("hybrid_fsdp_tp", 4): CHAINS,
    ("hybrid_fsdp_pp", 4): CHAINS,
    ("hybrid_ep_tp", 4): ("moe",),
    ("hybrid_ep_pp", 4): ("moe",),
}
MORE: dict[tuple[str, int], Sequence[str]] = {
    **{(plugin, 3): CHAINS[:2] for plugin in ("ddp", "fsdp", "zero1", "zero3", "gpipe", "1f1b")},
    **{(plugin, 4): CHAINS[:2] for plugin in ("fsdp", "zero2", "tensor", "sequence", "1f1b")},
    ("moe", 4): ("moe",),
    ("hybrid", 8): CHAINS[:2],
    ("hybrid_zero1", 8): CHAINS[:2],
    ("hybrid_sequence", 8): ("gpt",),
    ("hybrid_ep_all", 8): ("moe",),
}
"""More ranks than a plugin needs: the tests that run by hand."""

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of rounding a number once."""

BASE, FURTHER = [*MODES][:7], [*MODES][7:]
WITHOUT_BIAS = {"gpt": "tied", "moe": "moe_no_bias"}
"""Models for AdamW alone: the gradient of a key's bias is zero but for rounding."""


def cases_of(turn: int, model: str, modes: Sequence[str]) -> list[Case]:
    """``modes``, float32 and half precision once, with the other choices in turn.

    So each pair of plugin, mode, optimizer, accumulation and where metrics are is met.
    """
    found = []
    for at, mode in enumerate(modes, turn):
        follows = mode in ("percentile", "zscore", "schedule")
        chosen: dict[str, Any] = {"accumulation": (1, 3)[(at // 2 + turn) % 2], "kept": at % 3 == 0}
        chosen["optimizer"] = ("sgd", "momentum", "sgd", "adamw")[at % (3 if follows else 4)]
        chosen["steps"] = 8 if follows or "spike" in mode else 4
        net = "tied" if mode == "groups" and model == "conv" else model  # by names of blocks
        if mode in OF_ADAMW:
            net, chosen["optimizer"] = WITHOUT_BIAS.get(model, model), "adamw"
        found.append(Case(net, mode, **chosen))
    single = BASE[turn % len(BASE)]
    found += [Case(model, single, 1 + turn % 2, False, optimizer="adamw", kept=turn % 3 == 0)]
    half = {"accumulation": 2, "double": False, "rate": 0.5}
    return found + [Case(model, "L2", precision=precision, **half) for precision in ROUNDOFF]


def limit(case: Case) -> float:
    """Largest relative error of a metric of a case.

    In half precision each element is rounded elsewhere, by up to one unit roundoff u, a few times
    on its way. Errors have either sign: a metric, the mean of hundreds, is held to u/2.
    """
    if case.precision in ROUNDOFF:
        return ROUNDOFF[case.precision] / 2
    if not case.double:
        return 1e-5
    return 1e-9 if case.optimizer == "adamw" else 1e-12


def assert_agrees(plugin: str, world: int, cases: Sequence[Case]) -> None:
    ranks = run_ranks(train_all, world, plugin, cases, timeout=360)
    wrong = []
    for number, case in enumerate(cases):
        clipped = [row["clip/clipped"] for row in alone(case)["rows"]]
        assert any(clipped) == (case.mode != "none"), case
        found = differences([rank[number] for rank in ranks], case, limit(case))
        wrong += [f"{case}: {line}" for line in found[:4]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("turn", "plugin", "world"), [(n, *row) for n, row in enumerate(MATRIX)])
def test_float64_agrees_to_1e_12(turn, plugin, world):
    """And float32 to 1e-5, half precision to its rounding; replicas have the same bits."""
    models = MATRIX[plugin, world]
    kind = plugin in FAMILIES.get(world, ())
    modes = [*BASE, *(FURTHER if kind else FURTHER[turn % 6 :: 6])]
    assert_agrees(plugin, world, cases_of(turn, models[turn % len(models)], modes))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("plugin", "world", "model"),
    [(*row, model) for row, models in (MATRIX | MORE).items() for model in models],
)
def test_the_rest_of_the_product(plugin, world, model):
    assert_agrees(plugin, world, cases_of(len(model), model, [*MODES]))


@pytest.mark.parametrize("plugin", ["static", "offload", "zero_offload"])
def test_options_of_plugins(plugin):
    """PyTorch's ``no_sync`` fails in the first backward pass of a static graph."""
    assert_agrees(plugin, 2, [Case("tied", mode, 3) for mode in ("L2", "adaptive")])
