"""Under every plugin the step is that of one process: ‖G‖, clipped gradients, weights, counts.

Batches do not divide evenly; there are 17 tokens, 5 experts and 12 columns. An epoch has three
steps, the last one of one sample.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.distributed.cases import (
    FAMILIES,
    MODES,
    OF_ADAMW,
    PLUGINS,
    Case,
    differences,
    fewest,
    in_one_process,
    train,
)
from tests.ranks import run_ranks

EIGHT = ("hybrid", "hybrid_zero1", "hybrid_sequence", "hybrid_ep_all")
"""Plugins whose sizes can be more than 1 along all axes."""


def models_of(plugin: str) -> tuple[str, ...]:
    """Models that a plugin can train."""
    if "moe" in plugin or "_ep_" in plugin:
        return ("moe",)
    whole_layers = plugin.startswith(("ddp", "fsdp", "hsdp", "zero")) and "bubble" not in plugin
    return ("tied", "conv", "gpt") if whole_layers else ("gpt", "tied", "moe")


OPTIONS = ("offload", "zero_offload")
DAILY = [*FAMILIES[2], *FAMILIES[4], "pipeline_dp", "hybrid", "hybrid_ep_pp"]
MORE = [(p, fewest(p)) for p in PLUGINS if p not in (*OPTIONS, *EIGHT[2:])]
MORE += [("ddp", 3), ("fsdp", 3), ("zero1", 3), ("1f1b", 3), ("zero2", 4), ("tensor", 4)]
MORE += [(plugin, 8) for plugin in EIGHT]

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of rounding a number once."""

PROVED = ("none", "L2", "value", "adaptive")
BASE = ["L1", "L3", "inf"]
"""Each plugin has one of the first: ``test_same_step`` has them under all."""
FURTHER = [mode for mode in MODES if mode not in (*PROVED, *BASE)]
WITHOUT_BIAS = {"gpt": "tied", "conv": "tied", "moe": "moe_no_bias"}
"""Models for AdamW alone: the gradient of a key's bias is zero but for rounding."""


def cases_of(turn: int, model: str, modes: Sequence[str]) -> list[Case]:
    """``modes``, float32 and a half precision once, with the other choices in turn.

    With all modes each pair of mode, optimizer, accumulation and where metrics are is met.
    """
    cases = []
    for number, mode in enumerate(modes, turn):
        follows = mode in ("percentile", "zscore", "schedule")
        microbatches = (1, 3 if follows else 2)[(number // 2 + turn) % 2]
        chosen: dict[str, Any] = {"accumulation": microbatches, "kept": number % 3 == 0}
        chosen["optimizer"] = ("sgd", "momentum", "sgd", "adamw")[0 if follows else number % 4]
        chosen["steps"] = 8 if follows else 5 if "spike" in mode else 3
        net = "tied" if mode == "groups" and model == "conv" else model  # by names of blocks
        if mode in OF_ADAMW:
            net = WITHOUT_BIAS.get(model, model)
            chosen["optimizer"] = "adamw"
        cases.append(Case(net, mode, **chosen))
    single = [*MODES][turn % 7]
    few: dict[str, Any] = {"double": False, "steps": 3}
    kept = turn % 3 == 0
    cases += [Case(model, single, 1 + turn % 2, optimizer="adamw", kept=kept, **few)]
    if turn % 2 and len(modes) < len(MODES):
        return cases  # every other plugin has a half precision
    half = {"accumulation": 2, "rate": 0.5, **few}
    net = "tied" if model == "conv" else model  # the gradient of its bias cancels out
    precision = [*ROUNDOFF][turn // 2 % 2]
    return [*cases, Case(net, "L2", precision=precision, **half)]


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


def train_each(requests: dict[str, Sequence[Case]]) -> dict[str, list[dict[str, Any]]]:
    return {plugin: [train(case, plugin) for case in cases] for plugin, cases in requests.items()}


def assert_agree(requests: dict[str, Sequence[Case]], world: int) -> None:
    """Assert that on the same ranks each plugin takes the steps of one process."""
    ranks = run_ranks(train_each, world, requests)
    wrong = []
    for plugin, cases in requests.items():
        for number, case in enumerate(cases):
            clipped = [row["clip/clipped"] for row in in_one_process(case)["rows"]]
            assert any(clipped) == (case.mode != "none"), case
            problems = differences([rank[plugin][number] for rank in ranks], case, limit(case))
            wrong += [f"{plugin}, {case}: {line}" for line in problems[:4]]
    assert not wrong, "\n".join(wrong)


GROUPS = [
    *(("ddp", "tensor", "moe"), ("1f1b", "zero_bubble", "sequence"), ("fsdp", "zero1", "zero2")),
    ("hybrid", "hybrid_ep_pp", "moe_zero3"),
]
SLOW_GROUPS = [("hsdp", "hybrid_zero1", "pipeline_dp", "hybrid_fsdp_tp")]
"""``DAILY``, a start of ranks each. The last group has the ways of others, one along each axis;
``hybrid_fsdp_tp`` is ``tensor_zero3`` of ``test_same_step``."""


@pytest.mark.parametrize(
    "plugins",
    [*GROUPS, *(pytest.param(plugins, marks=pytest.mark.slow) for plugins in SLOW_GROUPS)],
    ids=" ".join,
)
def test_float64_agrees_to_1e_12(plugins):
    """And float32 to 1e-5, half precision to its rounding; replicas have the same bits."""
    cases = {}
    [world] = {fewest(plugin) for plugin in plugins}
    for plugin in plugins:
        turn = DAILY.index(plugin)
        models = models_of(plugin)
        every = 4 if plugin in FAMILIES[2] else len(FURTHER)
        modes = [PROVED[turn % 4], BASE[turn % 3], *FURTHER[turn % every :: every]]
        cases[plugin] = cases_of(turn, models[turn % len(models)], modes)
    assert_agree(cases, world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "world", "model"), [(*row, model) for row in MORE for model in models_of(row[0])]
)
def test_the_rest_of_the_product(plugin, world, model):
    assert_agree({plugin: cases_of(len(model), model, [*MODES])}, world)


def test_options_of_plugins():
    cases = [Case("tied", mode, 2, steps=3) for mode in ("L2", "adaptive")]
    assert_agree(dict.fromkeys(OPTIONS, cases), 2)
