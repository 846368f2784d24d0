"""Half precision under every plugin: close to one process, never out of step with each other."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runner.booster import LossScale
from runner.clip import ClipMode, Decision, build
from runner.clip.shard import local
from runner.data.dataset import IGNORED
from runner.parallel.full_state_dict import gathered
from tests.distributed import cases
from tests.distributed.cases import FAMILIES, MODELS, Case, trainer, uneven, unlike
from tests.distributed.training import Rows
from tests.ranks import run_ranks

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of rounding a number once."""

FIGURES = ("train/loss", "grad/norm", "grad/norm_clipped", "eval/loss")


def steps_in(precision: str, model: str, plugin: str | None = None) -> dict[str, Any]:
    """Five steps; under fp16 the scale grows after the third."""
    case = Case(model, "L2", 2, double=False, precision=precision, rate=0.5)
    scale = LossScale(scale=2.0**10, growth_interval=3) if precision == "fp16" else None
    result = cases.train(case, plugin, loss_scale=scale)
    return result | {"scale": scale.scale if scale is not None else None}


@cache
def alone(precision: str, model: str) -> dict[str, Any]:
    return steps_in(precision, model)


def in_all(plugin: str, model: str) -> dict[str, dict[str, Any]]:
    return {precision: steps_in(precision, model, plugin) for precision in ROUNDOFF}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("precision", ROUNDOFF)
@pytest.mark.parametrize("model", ["tied", "gpt", "moe"])
def test_the_forward_pass_is_in_half_precision(model, precision):
    half, full = alone(precision, model), alone("fp32", model)
    assert half["rows"][0]["train/loss"] != full["rows"][0]["train/loss"]
    # Its own error is what the bounds below are of the order of.
    first = [result["rows"][0]["grad/norm"] for result in (half, full)]
    assert first[0] == pytest.approx(first[1], rel=ROUNDOFF[precision])


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=3)
def test_half_precision_is_within_its_rounding_of_one_process(plugin, world):
    """Ranks multiply other matrices: fewer rows, parts of columns, sums in another order. So each
    element of an activation or a gradient is rounded elsewhere, by up to one unit roundoff u, a few
    times on its way. Errors have either sign: a figure of the whole model, the mean of hundreds,
    is held to u/2 (a fifth of that was found), a tensor, by its L2 norm, to 4u.
    """
    model = FAMILIES[plugin, world]
    ranks = run_ranks(in_all, world, plugin, model)
    for precision, roundoff in ROUNDOFF.items():
        ours, wanted = [rank[precision] for rank in ranks], alone(precision, model)
        assert not uneven(ours)
        for row, expected in zip(ours[0]["rows"], wanted["rows"], strict=True):
            assert row["clip/clipped"] == expected["clip/clipped"]
            for key in FIGURES:
                assert row.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), rel=roundoff / 2)
        for here, there in (
            (ours[0]["gradients"][0], wanted["gradients"][0]),
            (ours[0]["weights"], wanted["weights"]),
        ):
            if model == "moe":
                # A token on the edge between two experts may go to the other one, whose gradients
                # are then those of other tokens: only the model as a whole has a bound.
                here, there = ({"all": flat(tensors)} for tensors in (here, there))
            assert not unlike(precision, here, there, 4 * roundoff)
    assert {rank["fp16"]["scale"] for rank in ranks} == {alone("fp16", model)["scale"]} == {2.0**11}


POISON = 16
"""A target that no sample has, but one."""


def steep(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, with a gradient that overflows fp16 for the target ``POISON``."""
    poisoned = (targets == POISON).unsqueeze(-1)
    loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    return loss + 1e6 * (outputs * poisoned).sum()


def poisoned_steps(plugin: str | None, model: str) -> dict[str, Any]:
    """One epoch of three steps. The sample is in one microbatch, of one data part."""
    rows, scale = Rows(), LossScale(scale=2.0**10)
    case = Case(model, "L2", 2, double=False, steps=3, precision="fp16", rate=0.5)
    made = trainer(case, plugin, sinks=[rows], loss_scale=scale, criterion=steep)
    made.train_dataloader.dataset.targets[7] = POISON
    step, layout = made.optimizer.step, made.optimizer.layout
    taken, touched = [], []

    def watched() -> bool:
        before = [local(shard.param.detach()).clone() for shard in layout.shards]
        taken.append(step())
        after = [local(shard.param.detach()) for shard in layout.shards]
        touched.append(not all(map(torch.equal, before, after)))
        return taken[-1]

    made.optimizer.step = watched  # type: ignore[method-assign]
    made.fit()
    weights = made.booster.state_dict(made.model)
    return {
        "rows": rows.rows,
        "taken": taken,
        "touched": touched,
        "scale": scale.scale,
        "finite": all(bool(tensor.isfinite().all()) for tensor in weights.values()),
    }


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=3)
def test_an_overflow_in_one_data_part_skips_the_step_of_all_ranks(plugin, world):
    model = FAMILIES[plugin, world]
    wanted = poisoned_steps(None, model)
    assert sorted(wanted["taken"]) == [False, True, True]
    ranks = run_ranks(poisoned_steps, world, plugin, model)
    assert not uneven(ranks)
    for rank in ranks:
        assert rank["taken"] == wanted["taken"]
        assert rank["touched"] == wanted["taken"]
        assert rank["scale"] == wanted["scale"] == 2.0**9
        assert rank["finite"]
        skipped = [row["grad/nonfinite"] for row in rank["rows"]]
        assert skipped == [row["grad/nonfinite"] for row in wanted["rows"]]


def half_parameters(plugin: str | None, model: str) -> list[tuple[float, float]]:
    """Of each step, ‖G‖ as measured and that of the gathered gradients, which are bf16."""
    torch.manual_seed(0)
    kinds = iter((2.0, 1.0, 3.0, math.inf))
    case = Case(model, "none", 2, double=False, steps=4, rate=0.1)
    made = trainer(case, plugin, model=MODELS[model]().bfloat16())
    clip, found = made.optimizer.clip, []

    def compared(_: ClipMode, **how: bool) -> Decision:
        rule = build("norm", threshold=0.05, norm_type=next(kinds))
        made.optimizer.unscale()
        network = made.model.unwrap()
        whole = gathered(network, made.model.renamed, lambda p: p.grad)
        assert all(gradient.dtype == torch.bfloat16 for gradient in whole.values())
        outcome = clip(rule, **how)
        if whole:
            every = torch.cat([gradient.double().flatten() for gradient in whole.values()])
            reference = float(torch.linalg.vector_norm(every, rule.norm_type))
            found.append((float(outcome.norm), reference))
        return outcome

    made.optimizer.clip = compared  # type: ignore[method-assign]
    made.fit()
    return found


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=3)
def test_the_norm_of_bf16_gradients_is_taken_in_float32_or_better(plugin, world):
    measured = run_ranks(half_parameters, world, plugin, FAMILIES[plugin, world])[0]
    assert len(measured) == 4
    for norm, reference in measured:
        assert norm == pytest.approx(reference, rel=1e-5)
