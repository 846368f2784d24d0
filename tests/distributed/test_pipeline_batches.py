"""Stages and batches of any size: data parts that wait for each other, modules of many stages."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from runner.booster.plugin import HybridParallelPlugin
from runner.parallel.pipeline import Pipeline
from runner.parallel.stages import Part, Stage
from tests.distributed.by_hand import NORM, Loop, cross_entropy, unlike
from tests.distributed.cases import MODELS
from tests.distributed.odd_models import batch_for
from tests.ranks import run_ranks

WAITING = [
    ("moe", {"pp_size": 2, "ep_size": 2}),
    ("tied", {"pp_size": 2, "zero_stage": 2}),
]
WINDOWS = [
    # Samples and tokens that each of the two data parts reads, batch by batch.
    [((4, 12), (1, 12)), ((3, 12), (8, 8))],
    [((12, 8), (3, 12))],
]
UNSEEN = (0, 12), (5, 12)


def small(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def reads(part, samples, tokens):
    """What a data part reads: the first one from the front, the second one from the end."""
    at = slice(12 - samples, None) if part else slice(samples)
    inputs, targets = batch_for("gpt")
    return inputs[at, :tokens], targets[at, :tokens]


def windows_on_ranks():
    """Of each of WAITING: norms, outputs of each batch, weights of the whole."""
    results = []
    for name, options in WAITING:
        loop = Loop(HybridParallelPlugin(**options), small(name))
        part = loop.plugin.data_rank
        norms, outputs = [], []
        for window in WINDOWS:
            for sizes in window:
                pair = reads(part, *sizes[part])
                told = loop.booster.execute_pipeline(
                    iter([pair]), loop.model, cross_entropy, loop.optimizer, return_outputs=True
                )
                outputs.append(told["outputs"])
            norms.append(float(loop.clip(NORM).norm))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        outputs.append(loop.model.pipeline.evaluate(reads(part, *UNSEEN[part])[0]))
        results.append((part, norms, outputs, loop.weights()))
    return results


def windows_alone(name):
    """Norms, outputs of each batch by data part, weights."""
    loop = Loop(None, small(name))
    norms, outputs = [], ([], [])
    for window in WINDOWS:
        for sizes in window:
            for part, size in enumerate(sizes):
                inputs, targets = reads(part, *size)
                outputs[part].append(loop.raw(inputs).detach())
                loop.backward(inputs, targets, 0.5)
        norms.append(float(loop.clip(NORM).norm))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    for part, size in enumerate(UNSEEN):
        outputs[part].append(loop.raw(reads(part, *size)[0]).detach())
    return norms, outputs, loop.weights()


def test_data_parts_that_wait_for_each_other_may_read_batches_of_any_size():
    ranks = run_ranks(windows_on_ranks, 4, timeout=120)
    for number, each in enumerate(WAITING):
        norms, outputs, weights = windows_alone(each[0])
        assert unlike(ranks[0][number][3], weights, 1e-9) == [], each
        for rank in ranks:
            part, found, seen, _ = rank[number]
            assert found == pytest.approx(norms, rel=1e-9), each
            if seen[0] is not None:
                for got, wanted in zip(seen, outputs[part], strict=True):
                    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        assert sum(rank[number][2][0] is not None for rank in ranks) == 2, "one of each pipeline"


def recurrent(tied=True):
    """Layers of which one is there five times, and perhaps its weight once more."""
    torch.manual_seed(0)
    block, again, relu = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.ReLU()
    if tied:
        again.weight = block.weight
    layers = [nn.Linear(5, 6), *[block, relu] * 5, again, nn.Linear(6, 10)]
    return nn.Sequential(*layers).double()


def rows(samples):
    inputs = torch.randn(samples, 5, generator=torch.Generator().manual_seed(2)).double()
    return inputs, torch.arange(samples) % 10


SHARED = [
    ({"pp_size": 4}, True),
    ({"pp_size": 2, "schedule": "interleaved_1f1b"}, True),
    ({"pp_size": 2, "schedule": "zero_bubble", "zero_stage": 1}, True),
    ({"pp_size": 2, "zero_stage": 3}, False),
]


def shared_step(options, tied):
    """A step of :func:`recurrent`: ‖G‖, gradients and weights of the whole."""
    plugin = None if options is None else HybridParallelPlugin(**options)
    loop = Loop(plugin, recurrent(tied))
    loop.backward(*rows(12))
    norm = float(loop.clip(NORM).norm)
    gradients = loop.gradients()
    loop.optimizer.step()
    return norm, gradients, loop.weights()


def shared_steps():
    return [shared_step(*each) for each in SHARED]


def test_a_block_that_many_stages_use_counts_once_and_stays_one():
    ranks = run_ranks(shared_steps, 4, timeout=120)
    for number, (options, tied) in enumerate(SHARED):
        norm, gradients, weights = shared_step(None, tied)
        first = ranks[0][number]
        assert [rank[number][0] for rank in ranks] == pytest.approx([norm] * 4, rel=1e-9), options
        assert unlike(first[1], gradients, 1e-9) == [], options
        assert unlike(first[2], weights, 1e-9) == [], options


SIZES = [2, 4, 6, 8, 10, 12, 2, 12]


def steps_of_many_sizes(plugin):
    """Norms of steps, and how many schedules are left."""
    loop = Loop(plugin and HybridParallelPlugin(**plugin), recurrent())
    norms = []
    for samples in SIZES:
        loop.backward(*rows(samples))
        norms.append(float(loop.clip(NORM).norm))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return norms, len(loop.model.pipeline._made) if loop.model.pipeline else 0


def test_schedules_of_the_last_few_shapes_are_kept():
    wanted, _ = steps_of_many_sizes(None)
    for norms, kept in run_ranks(steps_of_many_sizes, 2, {"pp_size": 2}, timeout=120):
        assert norms == pytest.approx(wanted, rel=1e-9)
        assert kept == 4


class Moving(nn.Module):
    """Keeps statistics: a mean in a new tensor each time, and a count in the same one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden):
        self.mean = 0.9 * self.mean + 0.1 * hidden.mean()
        self.count += 1
        if self.count == 2:
            raise RuntimeError("no second microbatch")
        return hidden


@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_evaluation_in_training_mode_leaves_buffers_alone(microbatches):
    moving = nn.Sequential(Moving())
    stage = Stage(moving, [Part(("0",), moving)])
    pipeline = Pipeline({0: stage}, 1, "gpipe", microbatches, None, torch.device("cpu"))
    mean = moving[0].mean
    with nullcontext() if microbatches == 1 else pytest.raises(RuntimeError, match="no second"):
        pipeline.evaluate(torch.ones(4, 3))
    assert moving[0].mean is mean
    assert (moving[0].mean, moving[0].count) == (0, 0)
