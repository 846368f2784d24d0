"""Gradients that are not finite, and spikes: no rank takes the step, and all know who had it."""

import math
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runner import SkipRule
from runner.booster import NonFiniteGradient
from runner.data.dataset import IGNORED
from runner.gradients.shard import local
from tests.distributed.by_hand import NORM, Loop, batch_for, make
from tests.distributed.cases import PLUGINS, Case, fewest, trainer, uneven, unlike
from tests.distributed.test_collectives import Counting
from tests.distributed.training import Rows
from tests.on_device import call_kept_on_device
from tests.ranks import run_ranks

BAD = 16
"""A target that no sample has, but one, whose gradient is not finite."""

POISONED: dict[str, tuple[str, dict[str, Any]]] = {
    "nan": ("L2", {"bad": math.nan}),
    "inf": ("adaptive", {"bad": math.inf}),
    "nan, groups": ("groups", {"bad": math.nan}),
    "ignored": ("value", {"bad": math.nan, "nonfinite": "ignore"}),
    "an error": ("L1", {"bad": math.inf, "nonfinite": "error"}),
    "fp16": ("inf", {"bad": 1e6, "precision": "fp16"}),
    "fp16, an error": ("value", {"bad": math.nan, "precision": "fp16", "nonfinite": "error"}),
}
KINDS = {
    (2, "data"): ("ddp", "fsdp", "zero1"),
    (2, "model"): ("tensor", "1f1b", "moe"),
    (4, "all"): ("hsdp", "hybrid_zero1"),
}


def model_of(plugin: str) -> str:
    return "moe" if "moe" in plugin or "_ep_" in plugin else "tied"


@cache
def poisoned(plugin: str | None, model: str, name: str, kept: bool = False) -> dict[str, Any]:
    """Four steps, of which one or two have a gradient that is not finite, on one rank or stage."""
    if kept:
        return call_kept_on_device(poisoned, plugin, model, name)
    mode, options = POISONED[name]
    settings = dict(options)
    bad = settings.pop("bad")
    precision = settings.pop("precision", "fp32")
    seen = []

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
        marked = (targets == BAD).unsqueeze(-1)
        if not marked.any():
            return loss
        seen.append(True)
        return loss + bad * torch.where(marked, outputs, 0.0).sum()

    if math.isfinite(bad):  # A finite term of one batch alone is refused unless items are stated.
        criterion.loss_items = lambda targets: (targets != IGNORED).sum()
    rows = Rows()
    error = None
    case = Case(model, mode, 2, double=precision == "fp32", steps=4, precision=precision)
    # With a small eps, Adam turns rounding errors of a zero gradient into steps of size lr.
    adamw = partial(torch.optim.AdamW, lr=0.5, eps=1.0, weight_decay=0.1, fused=True)
    settings |= {"sinks": [rows], "criterion": criterion, "eval_dataloader": None}
    training = trainer(case, plugin, optimizer=adamw, **settings)
    training.state.schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(training.optimizer.unwrap(), 0.7)
    ]
    training.train_dataloader.dataset.targets[7] = BAD
    try:
        training.fit()
    except NonFiniteGradient as raised:
        error = str(raised)
    scale = training.optimizer.loss_scale
    rate = training.optimizer.param_groups[0]["lr"]
    skipped = [row["grad/nonfinite"] for row in rows.rows]
    return {
        "rows": rows.rows,
        "weights": training.booster.state_dict(training.model),
        "error": error,
        "saw": bool(seen),
        "told": [skipped, scale and scale.scale, rate, error is None],
    }


def asked_of(plugins: tuple[str, ...]) -> list[tuple[str, str, str, bool]]:
    """Every case under DDP, and half of them under each other plugin, in turn."""
    cases = product(enumerate(plugins), enumerate(POISONED))
    return [
        (plugin, model_of(plugin), name, (turn + number) % 4 < 2)  # metrics stay on the device
        for (turn, plugin), (number, name) in cases
        if plugin == "ddp" or (turn + number) % 2 == 0
    ]


def poisoned_each(plugins: tuple[str, ...]) -> list[dict[str, Any]]:
    return [poisoned(*case) for case in asked_of(plugins)]


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_a_step_that_is_not_finite_is_that_of_one_process(world, kind):
    """Rows, the rate of the schedule, the loss scale, errors and weights; on a device as well."""
    ranks = run_ranks(poisoned_each, world, KINDS[world, kind])
    wrong = []
    for number, (plugin, model, name, kept) in enumerate(asked_of(KINDS[world, kind])):
        ours = [rank[number] for rank in ranks]
        expected_run = poisoned(None, model, name)
        half = "fp16" in name
        assert expected_run["error"] or sum(expected_run["told"][0]), name
        problems = uneven(ours)
        for rank in ours:
            if rank["told"] != expected_run["told"] or rank["error"] != ours[0]["error"]:
                problems.append(
                    f"{rank['told']} instead of {expected_run['told']}: {rank['error']}"
                )
            # A run that ends with an error leaves out what needs the other ranks.
            for row, expected in zip(rank["rows"], expected_run["rows"], strict=True):
                for key in ("train/lr",) if rank["error"] else ("train/lr", "grad/norm"):
                    mine = row[key]
                    theirs = expected[key]
                    if mine != pytest.approx(theirs, rel=1e-3 if half else 1e-6, nan_ok=True):
                        problems.append(f"step {row['train/step']}: {key} {mine}, not {theirs}")
        weights = [run["weights"] for run in (ours[0], expected_run)]
        if name == "ignored":
            weights = [{n: t.isnan().double() for n, t in tensors.items()} for tensors in weights]
            assert any(tensor.any() for tensor in weights[1].values())
        problems += unlike("weights", *weights, 1e-2 if half else 1e-8)
        if kind == "data" and name == "an error":
            readers = [f"rank {rank}" for rank, result in enumerate(ours) if result["saw"]]
            assert any(reader in ours[0]["error"] for reader in readers), ours[0]["error"]
        wrong += [f"{plugin}, {name}, {kept}: {line}" for line in problems[:4]]
    assert not wrong, "\n".join(wrong)


# -- spikes

SPIKES = {6: 900.0, 8: 400.0, 9: 800.0, 10: math.nan, 11: 500.0}
STEPS = range(1, 13)
ON_EIGHT = ["hybrid_sequence", "hybrid_ep_all"]


def state_after(plugin, spikes, of):
    """Which steps were taken; weights and moments of this rank after steps, some with a spike."""
    rule = SkipRule("sigma", of=of, k=4.0, window=6, min_steps=3, accept_after=None)
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    model = model_of(plugin)
    loop = Loop(plugin, make(model), None, skip=rule if spikes else None, optimizer=adamw)
    # The spike is in the loss of the last data-parallel rank alone. Pipelines refuse a criterion
    # that differs between ranks.
    last = loop.plugin.data_rank == loop.plugin.data_size - 1 or loop.model.pipeline is not None
    taken = []
    for number in (n for n in STEPS if spikes or n not in SPIKES):
        spike = spikes.get(number) if last else None
        factor = 1.0 + 0.02 * math.sin(number)
        added = 0.0
        for group in loop.optimizer.param_groups:
            group["lr"] = 1e-3
        if of == "update" and spikes.get(number, math.nan) < math.inf:
            for group in loop.optimizer.param_groups:
                group["lr"] = 1.0  # the gradient and the loss are ordinary
        elif spike is not None and of in ("norm", "update"):
            factor *= spike
        elif spike is not None:
            added = spike  # the gradient is ordinary
        loop.backward(*batch_for(model), factor, added)
        loop.clip(NORM)
        loop.optimizer.step()
        taken.append(loop.optimizer.was_taken())
        loop.optimizer.zero_grad()
    states = [*loop.optimizer.unwrap().state.values()]
    tensors = [p.detach() for p in loop.raw.parameters()] + [t for s in states for t in s.values()]
    return taken, [local(tensor).clone() for tensor in tensors]


def with_and_without(plugins, quantities):
    """Steps with spikes and the rule, and those without the spikes and without a rule."""
    pairs = []
    for plugin in plugins:
        expected = state_after(plugin, {}, "norm")
        pairs += [(state_after(plugin, SPIKES, of), expected) for of in quantities]
    return pairs


def assert_skipped(world, plugins, quantities):
    for rank in run_ranks(with_and_without, world, plugins, quantities):
        for (taken, ours), (_, expected) in rank:
            assert taken == [number not in SPIKES for number in STEPS]
            assert len(ours) == len(expected) > 0
            assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(
    ("world", "plugins"), [(2, ("ddp", "fsdp", "1f1b", "moe")), (4, ("hybrid_zero1",))]
)
def test_all_ranks_skip_the_spike_of_one(world, plugins):
    """Weights and moments are those of a run without the spikes, bit for bit on every rank."""
    assert_skipped(world, plugins, ("norm", "loss", "update"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_ranks_skip_the_spike_of_one_under_every_plugin(world):
    plugins = ON_EIGHT
    if world < 8:
        plugins = [name for name in PLUGINS if fewest(name) == world and name not in ON_EIGHT]
    assert_skipped(world, plugins, ("norm", "loss", "any", "update"))


def calls_of_clipping(plugins):
    """The collectives of a clipping under each plugin, without a rule and by what it compares."""
    counts = {}
    for plugin in plugins:
        for of in (None, "norm", "loss", "any"):
            skip = None if of is None else SkipRule(of=of)
            model = model_of(plugin)
            loop = Loop(plugin, make(model), None, skip=skip)
            loop.backward(*batch_for(model))
            with Counting() as counter:
                loop.clip(NORM)
            counts[plugin, of] = counter.calls.total()
    return counts


def test_a_loss_travels_with_the_norm_where_ranks_sum_that():
    [counts, _] = run_ranks(calls_of_clipping, 2, ("fsdp", "tensor", "ddp"))
    for plugin in ("fsdp", "tensor", "ddp"):
        more = 1 if plugin == "ddp" else 0  # each rank has the whole gradient
        assert counts[plugin, "norm"] == counts[plugin, None]
        for of in ("loss", "any"):
            assert counts[plugin, of] == counts[plugin, None] + more, (plugin, of)
