"""Gradients that are averaged while the backward pass goes on are those of an average after it."""

import copy
import gc
import math
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from runner.booster import Booster
from runner.parallel import bucket, collectives
from runner.parallel.collectives import full
from tests.distributed.cases import Ddp, Fsdp, Hybrid, Zero
from tests.ranks import run_ranks


class Forked(nn.Module):
    """Which of two branches is used depends on the batch; the rest is used always."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, inputs):
        branch = self.left if float(inputs[0, 0]) > 0 else self.right
        return self.head(branch(self.enter(inputs)).tanh())


def accumulated(model, backward, no_sync, step):
    with no_sync():
        backward(0.25)
    backward(0.75)


def replaced(model, backward, no_sync, step):
    backward()
    if step % 2:
        model.enter.weight.grad = torch.full_like(model.enter.weight, float(dist.get_rank()))
        model.head.bias.grad = None


def dropped(model, backward, no_sync, step):
    backward()
    for parameter in model.parameters():
        parameter.grad = None
    backward()


def zeroed(model, backward, no_sync, step):
    backward()
    model.zero_grad(set_to_none=False)
    backward()


WAYS = {
    "once": lambda model, backward, no_sync, step: backward(),
    "not finite": lambda model, backward, *_: backward(math.nan if dist.get_rank() else 1.0),
    **{way.__name__: way for way in (accumulated, replaced, dropped, zeroed)},
}


def unlike_the_mean(model, reference):
    """Names of gradients that are not the mean over ranks of those of ``alone``."""
    names = []
    for (name, got), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        mean = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        mine = torch.zeros_like(got) if got.grad is None else got.grad
        if not torch.allclose(mine, mean, 1e-12, 1e-15, True):
            names.append(name)
    return names


def trained(way, make):
    """What is wrong with gradients, and how many buckets each step sent early and in all."""
    torch.manual_seed(1)
    model = Forked().double()
    sent = []
    wrong = []
    early = []
    reference = copy.deepcopy(model)
    send = dist.all_reduce
    booster = Booster(plugin=make(), nonfinite="ignore")
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def side(net, run):
        draw = torch.Generator().manual_seed(dist.get_rank())

        def backward(share=1.0):
            inputs = torch.randn(4, 5, generator=draw, dtype=torch.float64)
            (F.cross_entropy(run(inputs), torch.tensor([1, 2, 3, 4])) * share).backward()

        return net, backward

    ours = side(model, boosted)
    theirs = side(reference, reference)
    for step in range(4):
        dist.all_reduce = lambda *args, **options: (sent.append(1), send(*args, **options))[1]
        way(*ours, lambda: booster.no_sync(boosted, optimizer), step)
        before = len(sent)
        optimizer.unscale()
        early.append((before, len(sent)))
        dist.all_reduce = send
        sent.clear()
        way(*theirs, nullcontext, step)
        wrong += [f"step {step}: {name}" for name in unlike_the_mean(model, reference)]
        optimizer.zero_grad()
        reference.zero_grad()
    return wrong, early


def trained_each(make):
    collectives.BUCKET = 300  # bytes: several buckets
    bucket.SMALL = 20  # elements: biases are copied to a buffer and back, weights are parts of it
    return {name: trained(way, make) for name, way in WAYS.items()}


@pytest.mark.parametrize(("make", "world"), [(Hybrid, 2), (Zero, 3)])
def test_gradients_are_the_average_in_whatever_way_they_came_about(make, world):
    for rank in run_ranks(trained_each, world, make):
        assert {name: wrong for name, (wrong, _) in rank.items() if wrong} == {}
        for name in ("once", "accumulated", "not finite"):
            assert all(0 < sent < total for sent, total in rank[name][1]), name
        assert rank["once"][1][0][1] < rank["dropped"][1][0][1], "nothing is sent again"


def both_in_one_pass():
    """Steps of wrong gradients of two models, of which ranks use other branches."""
    collectives.BUCKET = 300
    torch.manual_seed(1)
    models = [Forked().double(), Forked().double()]
    wrong = []
    references = copy.deepcopy(models)
    booster = Booster(plugin=Hybrid())
    boosted_models = [
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models
    ]
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        inputs = [torch.randn(4, 5, generator=draw, dtype=torch.float64) for _ in models]
        for nets in ([boosted for boosted, *_ in boosted_models], references):
            pairs = zip(nets, inputs, strict=True)
            sum(net(batch).square().sum() for net, batch in pairs).backward()
        for (_, optimizer, *_), net, reference in zip(
            boosted_models, models, references, strict=True
        ):
            optimizer.unscale()
            wrong += [step for name in unlike_the_mean(net, reference)]
            optimizer.zero_grad()
            reference.zero_grad()
    return wrong


def after_a_dropped_window(make, inside):
    """What is wrong with gradients after windows of another branch were dropped."""
    torch.manual_seed(1)
    model = Forked()
    reference = copy.deepcopy(model)
    booster = Booster(plugin=make())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for sign, none in ((1.0, True), (-1.0, False), (-1.0, True)):
        with booster.no_sync(boosted, optimizer) if inside else nullcontext():
            boosted(torch.full((4, 5), sign)).sum().backward()
        optimizer.zero_grad(set_to_none=none)
    for net in (boosted, reference):
        net(torch.full((4, 5), -1.0)).sum().backward()
    optimizer.unscale()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    got = [(name, p.grad, theirs.grad) for (name, p), theirs in pairs]
    assert not [name for name, mine, theirs in got if (mine is None) != (theirs is None)]
    return [
        n
        for n, g, theirs in got
        if theirs is not None and not torch.allclose(full(g), theirs, 0.02)
    ]


def groups_in_turn():
    """Groups in which models send that are trained one after the other; one is left unfinished."""
    used = []
    send = dist.all_reduce
    for ends in (True, True, False, True):
        gc.collect()
        used.append(set())
        dist.all_reduce = lambda *args, group, **more: (
            used[-1].add(group),
            send(*args, group=group, **more),
        )[1]
        model = Forked()
        booster = Booster(plugin=Ddp())
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        boosted(torch.ones(4, 5)).sum().backward()
        dist.barrier()
        if ends:
            optimizer.unscale()
        dist.all_reduce = send
        del model, booster, boosted, optimizer
    return used[0] == used[1], used[2] < used[0], used[2].isdisjoint(used[3]), len(used[3])


class Split(nn.Sequential):
    tp_plan: ClassVar = {"0": "colwise_rep"}


def one_rank_keeps_a_model():
    """A group is made by all ranks or by none: another mesh would wait for ever otherwise."""
    kept = []
    for plugin in (Hybrid(tp_size=2), Hybrid(tp_size=2), Ddp()):
        model = Split(nn.Linear(4, 4))
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        booster.backward(boosted(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
        kept += [(booster, boosted, optimizer)] * (dist.get_rank() == 0)
        del model, booster, boosted, optimizer
        gc.collect()
    return len(kept)


def test_models_in_turn_when_one_rank_keeps_them():
    assert run_ranks(one_rank_keeps_a_model, 4, timeout=120) == [3, 0, 0, 0]


def several_models():
    kinds = [Ddp, Fsdp, partial(Fsdp, param_dtype="bf16")]
    cases = product(kinds, (False, True))
    together = both_in_one_pass()
    return together, groups_in_turn(), [after_a_dropped_window(*case) for case in cases]


@cache
def several_on_two_ranks():
    return run_ranks(several_models, 2)


@pytest.mark.xdist_group("several models")  # the ranks run once
def test_two_models_in_one_backward_pass_send_apart():
    assert [wrong for wrong, _, _ in several_on_two_ranks()] == [[], []]


@pytest.mark.xdist_group("several models")
def test_models_that_are_trained_in_turn_send_in_the_same_groups():
    assert [groups for _, groups, _ in several_on_two_ranks()] == [(True, True, True, 2)] * 2


@pytest.mark.xdist_group("several models")
def test_a_window_that_is_dropped_leaves_nothing():
    assert [wrong for _, _, wrong in several_on_two_ranks()] == [[[]] * 6] * 2


def gradients_that_are_held():
    """Gradients of a step that somebody still holds, after further steps and as they were."""
    bucket.SMALL = 20
    torch.manual_seed(1)
    model = Forked().double()
    booster = Booster(plugin=Hybrid())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(dist.get_rank())
    parts = []
    copies = []
    for none in (True, False, True):
        boosted(torch.randn(4, 5, generator=draw, dtype=torch.float64)).square().sum().backward()
        optimizer.unscale()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        parts += [gradient[:1] for gradient in gradients] if none else []
        copies += [gradient[:1].clone() for gradient in gradients] if none else []
        optimizer.zero_grad(set_to_none=none)
    return [torch.equal(part, copy) for part, copy in zip(parts, copies, strict=True)]


def test_gradients_that_somebody_holds_are_not_written_by_later_steps():
    for equal in run_ranks(gradients_that_are_held, 2):
        assert len(equal) > 4
        assert all(equal)
