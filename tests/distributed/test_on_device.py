"""Under every plugin, a step whose metrics stay on the accelerator is the step of one process that
reads them: each mode, and gradients that are not finite under each policy.

CPU tensors stand in for an accelerator's (``tests/on_device.py``). The optimizer is fused, so that
it is the device that decides whether a step is taken.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from runner.booster import Booster, LossScale, NonFiniteGradient
from runner.booster.plugin import LowLevelZeroPlugin
from runner.clip import ClipMode, Decision
from runner.data.dataset import IGNORED
from tests.distributed.cases import (
    MODES,
    TIMES,
    Case,
    differences,
    train,
    trainer,
    uneven,
)
from tests.distributed.test_matrix import MATRIX, models_of
from tests.distributed.training import Rows
from tests.on_device import Waits, call_kept_on_device
from tests.ranks import run_ranks

TOGETHER: dict[int, dict[str, dict[str, str]]] = {
    2: {
        "data": {"ddp": "tied", "fsdp": "conv", "zero1": "conv", "zero2": "gpt", "zero3": "tied"},
        "model": {"tensor": "tied", "sequence": "gpt", "1f1b": "tied", "zero_bubble": "gpt"},
        "experts": {"moe": "moe"},
    },
    4: {"hybrid": {"hybrid_zero1": "tied"}},
}
"""Plugins, and a model for each, that share one start of so many ranks."""

STARTS = [(world, kind) for world, kinds in TOGETHER.items() for kind in kinds]


def all_of(plugins: dict[str, str], cases: dict[str, Sequence[Case]]) -> list[Any]:
    return [[train(case, plugin) for case in cases[plugin]] for plugin in plugins]


def assert_agrees(world: int, plugins: dict[str, str], cases: dict[str, Sequence[Case]]) -> None:
    """That all ``cases`` are those of one process whose host reads every metric."""
    ranks = run_ranks(call_kept_on_device, world, all_of, plugins, cases)
    wrong = {}
    for i, plugin in enumerate(plugins):
        for j, case in enumerate(cases[plugin]):
            found = differences([rank[i][j] for rank in ranks], case, 1e-12)
            if found:
                wrong[f"{plugin}: {case}"] = (len(found), found[:4])
    assert not wrong


@pytest.mark.parametrize(("world", "kind"), STARTS)
@pytest.mark.product(every=4)
def test_every_mode_under_every_kind_of_plugin(world, kind):
    plugins = TOGETHER[world][kind]
    cases = {
        plugin: [Case(model, mode, 2, steps=3) for mode in MODES]
        for plugin, model in plugins.items()
    }
    assert_agrees(world, plugins, cases)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plugin", "world", "model"), [(*row, model) for row in MATRIX for model in models_of(row[0])]
)
def test_the_whole_product_agrees(plugin, world, model):
    cases = [Case(model, mode, steps) for mode, steps in product(MODES, (1, 3))]
    assert_agrees(world, {plugin: model}, {plugin: cases})


@pytest.mark.parametrize("mode", MODES)
def test_one_process(mode):
    for model in ("conv", "tied"):
        case = Case(model, mode, 2, steps=3)
        assert not differences([call_kept_on_device(train, case)], case, 1e-12)


def waits_of(plugin: str, model: str, mode: str) -> list[str]:
    """What makes the host wait in ``clip`` and ``step``, on final gradients."""
    adamw = partial(torch.optim.AdamW, lr=0.1, fused=True)
    made = trainer(Case(model, mode, steps=2), plugin, optimizer=adamw)
    clip, step, waits = made.optimizer.clip, made.optimizer.step, Waits()

    def clipped(rule: ClipMode, **options: bool) -> Decision:
        made.optimizer.unscale()
        with waits:
            return clip(rule, **options)

    def stepped() -> bool:
        with waits:
            return step()

    made.optimizer.clip, made.optimizer.step = clipped, stepped  # type: ignore[method-assign]
    made.fit()
    return [f"{plugin}, {mode}: {wait}" for wait in waits.found]


def waits_under(plugins: dict[str, str]) -> list[str]:
    modes = ("none", "L1", "inf", "value", "adaptive")
    asked = product(plugins.items(), modes)
    return [wait for (plugin, model), mode in asked for wait in waits_of(plugin, model, mode)]


@pytest.mark.parametrize(("world", "kind"), STARTS)
def test_no_step_waits_for_the_device(world, kind):
    ranks = run_ranks(call_kept_on_device, world, waits_under, TOGETHER[world][kind])
    assert ranks == [[]] * world


BAD = 16
"""A target that no sample has, but one."""

POISONED: dict[str, dict[str, Any]] = {
    "nan": {"bad": math.nan},
    "inf": {"bad": math.inf},
    "ignored": {"bad": math.nan, "nonfinite": "ignore"},
    "an error": {"bad": math.inf, "nonfinite": "error"},
    "fp16": {"bad": math.inf, "precision": "fp16"},
    "fp16, an error": {"bad": math.nan, "precision": "fp16", "nonfinite": "error"},
}
MODE_OF = dict(zip(POISONED, ("L2", "adaptive", "value", "L1", "inf", "value"), strict=True))


def poisoned_steps(
    plugin: str | None,
    model: str,
    mode: str,
    bad: float,
    nonfinite: str = "skip",
    precision: str = "fp32",
) -> dict[str, Any]:
    """Four steps, of which one or two have a gradient that is not finite, on one rank or stage."""

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
        poisoned = (targets == BAD).unsqueeze(-1)
        return loss + bad * torch.where(poisoned, outputs, 0.0).sum() if poisoned.any() else loss

    rows = Rows()
    scale = LossScale(scale=2.0**10) if precision == "fp16" else None
    case = Case(model, mode, 2, double=scale is None, steps=4, precision=precision)
    made = trainer(
        case,
        plugin,
        # With a small eps, Adam turns rounding errors of a zero gradient into steps of size lr.
        optimizer=partial(torch.optim.AdamW, lr=0.5, eps=1.0, weight_decay=0.1, fused=True),
        sinks=[rows],
        loss_scale=scale,
        criterion=criterion,
        nonfinite=nonfinite,
    )
    made.state.schedulers = [torch.optim.lr_scheduler.ExponentialLR(made.optimizer.unwrap(), 0.7)]
    made.train_dataloader.dataset.targets[7] = BAD
    error = None
    try:
        made.fit()
    except NonFiniteGradient as raised:
        error = str(raised)
    return {
        "rows": rows.rows,
        "weights": made.booster.state_dict(made.model),
        "gradients": [],
        "error": error,
        "scale": scale and scale.scale,
        "fused": made.optimizer._fused,
        "rate": made.optimizer.param_groups[0]["lr"],
    }


def both_ways(plugins: dict[str, str]) -> list[Any]:
    """Of each plugin and case, what the host decides, and what the device decides."""
    asked = [
        (plugin, model, MODE_OF[name], options)
        for plugin, model in plugins.items()
        for name, options in POISONED.items()
    ]
    return [
        (
            poisoned_steps(plugin, model, mode, **options),
            call_kept_on_device(partial(poisoned_steps, plugin, model, mode, **options)),
        )
        for plugin, model, mode, options in asked
    ]


def rows_unlike(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> list[str]:
    """Which metrics of which step differ by more than float32 rounds."""
    return [
        f"step {row['train/step']}: {key} {row.get(key)!r} instead of {expected[key]!r}"
        for row, expected in zip(got, wanted, strict=True)
        for key in expected
        if key not in TIMES and row.get(key) != pytest.approx(expected[key], rel=1e-6, nan_ok=True)
    ]


class Momentum(nn.Module):
    """Two weights, of which one rank steps the first and the other the second under zero 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), 0.5))
        self.second = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.first * self.second)


def momentum_on_one_rank() -> tuple[list[bool], list[int], dict[str, Tensor]]:
    """Which steps were taken, how many weights this rank steps in each group, and the weights."""
    model = Momentum()
    groups = [{"params": [model.first], "momentum": 0.9}, {"params": [model.second]}]
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1) if dist.is_initialized() else None)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(groups, lr=0.1, fused=True))
    taken = []
    for factor in (math.nan, 1.0, math.inf, 2.0):
        booster.backward(boosted(torch.ones(2, 4)).sum() * factor, optimizer)
        optimizer.clip_grad_by_value(0.1)
        optimizer.step()
        taken.append(optimizer.was_taken())
        optimizer.zero_grad()
    held = [len(group["params"]) for group in optimizer.param_groups]
    return taken, held, booster.state_dict(boosted)


def test_ranks_decide_alike_where_one_has_no_momentum_to_start():
    wanted, _, weights = momentum_on_one_rank()
    assert wanted == [False, True, False, True]
    ranks = run_ranks(call_kept_on_device, 2, momentum_on_one_rank, timeout=120)
    assert sorted(held for _, held, _ in ranks) == [[0, 1], [1, 0]]
    assert [taken for taken, _, _ in ranks] == [wanted] * 2
    for name, weight in weights.items():
        torch.testing.assert_close(ranks[0][2][name], weight)


@pytest.mark.parametrize(("world", "kind"), STARTS)
@pytest.mark.product(every=4)
def test_a_gradient_that_is_not_finite_under_every_kind_of_plugin(world, kind):
    """Rows, the rate of the schedule, the loss scale, errors and weights are those of a CPU."""
    plugins = {name: model for name, model in TOGETHER[world][kind].items() if model != "conv"}
    ranks = run_ranks(both_ways, world, plugins)
    found = []
    for number, (plugin, name) in enumerate(product(plugins, POISONED)):
        read, kept = ([rank[number][way] for rank in ranks] for way in (0, 1))
        assert all(result["fused"] for result in kept)
        assert sum(row["grad/nonfinite"] for row in read[0]["rows"]) or read[0]["error"], name
        wrong = uneven(kept)
        for ours, wanted in zip(kept, read, strict=True):
            wrong += rows_unlike(ours["rows"], wanted["rows"])
            wrong += [
                f"{key}: {ours[key]!r} instead of {wanted[key]!r}"
                for key in ("error", "scale", "rate")
                if ours[key] != wanted[key]
            ]
        for key, tensor in read[0]["weights"].items():
            if not torch.allclose(kept[0]["weights"][key], tensor, 1e-5, 1e-6, equal_nan=True):
                wrong.append(f"{key} is another weight")
        found += [f"{plugin}, {name}: {line}" for line in wrong[:4]]
    assert not found, "\n".join(found)
