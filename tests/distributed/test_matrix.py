"""Under every plugin the step is that of one process: ‖G‖, clipped gradients, weights, counts.

Plain SGD at a rate of 1, so that a wrong factor on a gradient shows (an adaptive optimizer would
hide it), on batches that do not divide evenly, with 17 tokens, 5 experts and 12 columns.
"""

from collections.abc import Sequence
from itertools import cycle, product

import pytest

from tests.distributed.cases import MODELS, MODES, Case, alone, differences, train_all
from tests.ranks import run_ranks

SAME_SAMPLES = ("gpt", "tied", "moe", "conv")
"""Models of plugins under which a rank has whole layers, whatever they are."""

CHAINS = ("gpt", "tied", "moe")
"""Models that have a plan of their own for tensor parallelism, and that can be cut."""

MATRIX: dict[tuple[str, int], Sequence[str]] = {
    ("ddp", 2): SAME_SAMPLES,
    ("fsdp", 2): SAME_SAMPLES,
    ("fsdp_gathered", 2): SAME_SAMPLES,
    ("hsdp", 2): ("gpt", "conv"),
    ("zero1", 2): SAME_SAMPLES,
    ("zero2", 2): SAME_SAMPLES,
    ("zero3", 2): SAME_SAMPLES,
    ("tensor", 2): CHAINS,
    ("sequence", 2): CHAINS,
    ("gpipe", 2): CHAINS,
    ("1f1b", 2): CHAINS,
    ("interleaved", 2): CHAINS,
    ("zero_bubble", 2): CHAINS,
    ("moe", 2): ("moe",),
    ("moe_zero3", 2): ("moe",),
    ("ddp", 4): ("gpt", "moe"),
    ("fsdp", 4): ("tied", "moe"),
    ("hsdp", 4): ("gpt", "tied", "conv"),
    ("zero1", 4): ("gpt", "conv"),
    ("zero2", 4): ("gpt", "conv"),
    ("zero3", 4): ("tied", "conv"),
    ("tensor", 4): ("gpt", "tied"),
    ("tensor_dp", 4): ("tied", "moe"),
    ("sequence", 4): ("gpt", "tied"),
    ("gpipe", 4): ("gpt", "tied"),
    ("1f1b", 4): ("gpt", "tied"),
    ("pipeline_dp", 4): ("tied", "moe"),
    ("interleaved_dp", 4): ("tied",),
    ("zero_bubble_dp", 4): ("gpt",),
    ("moe", 4): ("moe",),
    ("moe_dp", 4): ("moe",),
    ("moe_zero1", 4): ("moe",),
    ("moe_zero3", 4): ("moe",),
    ("hybrid", 4): ("gpt", "tied"),
    ("hybrid_fsdp_tp", 4): ("gpt", "tied"),
    ("hybrid_fsdp_pp", 4): ("gpt", "tied"),
    ("hybrid_ep_tp", 4): ("moe",),
    ("hybrid_ep_pp", 4): ("moe",),
    ("hybrid", 8): ("gpt", "tied"),
    ("hybrid_zero1", 8): ("gpt", "tied"),
    ("hybrid_zero2", 8): ("tied",),
    ("hybrid_sequence", 8): ("gpt",),
    ("hybrid_ep_tp", 8): ("moe",),
    ("hybrid_ep_pp", 8): ("moe",),
    ("hybrid_ep_all", 8): ("moe",),
}

FEWEST: dict[str, tuple[int, str]] = {
    plugin: (world, models[0]) for (plugin, world), models in reversed(MATRIX.items())
}
"""Of each plugin, its smallest row of the matrix."""

DAILY = [
    (*row, models[turn % len(models)])
    for turn, (row, models) in enumerate(MATRIX.items())
    if row == ("hybrid", 8) or (row[1] < 8 and FEWEST[row[0]][0] == row[1])
]
"""What the gate runs: each plugin on its fewest ranks, with one of its models in turn."""


def cases_of(plugin: str, world: int, model: str) -> list[Case]:
    """All modes by all accumulations on 2 ranks. On more, and with experts that another plugin
    takes for layers like any other, a training takes many times as long: every mode once;
    accumulations alternate, and begin elsewhere for each model.
    """
    if world == 2 and (model != "moe" or plugin.startswith("moe")):
        return [Case(model, mode, steps) for mode, steps in product(MODES, (1, 3))]
    steps = cycle((1, 3) if list(MODELS).index(model) % 2 else (3, 1))
    return [Case(model, mode, each) for mode, each in zip(MODES, steps, strict=False)]


def models_of(plugin: str) -> Sequence[str]:
    """All models that ``plugin`` is for."""
    if "moe" in plugin or "_ep_" in plugin:
        return ("moe",)
    return SAME_SAMPLES if plugin == "hsdp" else MATRIX.get((plugin, 2), CHAINS)


def rest_of(plugin: str, world: int, model: str) -> list[Case]:
    """All modes with all accumulations, except the cases of :func:`cases_of`."""
    whole = [Case(model, mode, steps) for mode, steps in product(MODES, (1, 3))]
    taken = cases_of(plugin, world, model) if model in MATRIX[plugin, world] else []
    return [case for case in whole if case not in taken]


def single_precision(model: str, world: int) -> list[Case]:
    """In float32: every mode on 2 ranks, one of each kind on more."""
    modes = MODES if world == 2 else ("L2", "value", "adaptive")
    steps = cycle((1, 3))
    return [Case(model, mode, each, double=False) for mode, each in zip(modes, steps, strict=False)]


def assert_agrees(
    plugin: str, world: int, cases: Sequence[Case], rel: float, timeout: float = 150
) -> None:
    ranks = run_ranks(train_all, world, plugin, cases, timeout=timeout)
    wrong = {}
    for number, case in enumerate(cases):
        found = differences([rank[number] for rank in ranks], case, rel)
        if found:
            wrong[f"{case.mode} x {case.accumulation}"] = (len(found), found[:4])
    assert not wrong


@pytest.mark.parametrize("model", MODELS)
def test_every_threshold_binds(model):
    for case in cases_of("moe", 2, model):
        clipped = sum(row["clip/clipped"] for row in alone(case)["rows"])
        assert (clipped > 0) == (case.mode != "none"), case


@pytest.mark.parametrize(
    ("plugin", "world", "model"),
    [
        pytest.param(*row, model, marks=[] if (*row, model) in DAILY else pytest.mark.slow)
        for row, models in MATRIX.items()
        for model in models
    ],
)
def test_float64_agrees_to_1e_12(plugin, world, model):
    assert_agrees(plugin, world, cases_of(plugin, world, model), 1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plugin", "world", "model"),
    [(*row, model) for row in MATRIX for model in models_of(row[0]) if rest_of(*row, model)],
)
def test_the_rest_of_the_product_agrees_to_1e_12(plugin, world, model):
    assert_agrees(plugin, world, rest_of(plugin, world, model), 1e-12, timeout=500)


@pytest.mark.parametrize("plugin", FEWEST)
@pytest.mark.product(every=30)
def test_float32_agrees_to_1e_5(plugin):
    # Which elements count where is the same code in any type, and float64 leaves an error nowhere
    # to hide. What float32 has of its own is how a sum of squares is taken: one model is enough.
    world, model = FEWEST[plugin]
    assert_agrees(plugin, world, single_precision(model, world), 1e-5)


def test_a_static_graph_accumulates():
    """PyTorch's ``no_sync`` fails in the first backward pass of a static graph."""
    case = Case("tied", "L2", 3)
    ranks = run_ranks(train_all, 2, "static", [case])
    assert not differences([rank[0] for rank in ranks], case, 1e-12)
