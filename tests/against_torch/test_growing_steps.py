"""``accumulation.steps`` in phases: the steps of plain PyTorch on growing batches."""

from functools import cache

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from tests.against_torch.conditions import PLUGINS, network, sgd
from tests.against_torch.plain import fit, step_by_torch
from tests.ranks import run_ranks

SAMPLES, BATCH = 20, 4
PHASES = {0: 1, "2ba": 2, "4ba": 4}
# An epoch has five microbatches, so that its last window may be short.
STEPS = [(0, 4), (4, 8), (8, 16), (16, 20), (0, 16), (16, 20), (0, 16)]
ON_TWO_RANKS = [name for name, kind in PLUGINS.items() if kind.ranks == 2]


def data():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(6, (SAMPLES,), generator=generator)


class Moves:
    """Whether the parameters of this rank differ after each microbatch of a step."""

    def __init__(self):
        self.table = []
        self.before = None

    def on_start(self, trainer):
        self.before = self.weights(trainer)

    def on_microbatch(self, trainer, number, of):
        weights = self.weights(trainer)
        moved = not torch.equal(weights, self.before)
        self.before = weights
        self.table.append((trainer.state.progress.step + 1, number, of, moved))

    def weights(self, trainer):
        shards = trainer.optimizer.layout.shards
        return torch.cat([shard.weight.detach().flatten().clone() for shard in shards])


def by_samples(optimizer):
    schedule = StepLR(optimizer, 4, 0.5)
    schedule.by_samples = True
    return schedule


def train(*names):
    """For each plugin: weights, rows and samples of a training, and what moved when."""
    results = {}
    for name in names:
        plugin = PLUGINS[name].make()
        net = network(name)
        optimizer = sgd(net)
        moves = Moves()
        loader = plugin.prepare_dataloader(TensorDataset(*data()), BATCH // plugin.data_size)
        options = {"optimizers": optimizer, "schedulers": by_samples(optimizer)}
        options |= {"accumulation_steps": PHASES, "callbacks": [moves]}
        trained = fit(plugin, net, loader, len(STEPS), **options)
        results[name] = (*trained, moves.table)
    return results


@cache
def trainings():
    return [train("single"), *run_ranks(train, 2, *ON_TWO_RANKS)]


def by_torch(name):
    """Weights after the steps, the norms, and the rate of each step, of one process."""
    net = network(name)
    optimizer = sgd(net)
    inputs, targets = data()
    rates = []

    def losses():
        done = 0
        for first, end in STEPS:
            optimizer.param_groups[0]["lr"] = 0.3 * 0.5 ** (done // 4)  # of microbatches
            rates.append(optimizer.param_groups[0]["lr"])
            done += (end - first) // BATCH
            yield F.cross_entropy(net(inputs[first:end]), targets[first:end])

    norms = [norm for _, norm in step_by_torch(net, losses(), optimizer)]
    return dict(net.named_parameters()), norms, rates


def assert_equal_steps(results):
    for rank, by_plugin in enumerate(results):
        for name, (weights, rows, samples, _) in by_plugin.items():
            expected_weights, norms, rates = by_torch(name)
            assert [row["grad/norm"] for row in rows] == pytest.approx(norms, rel=1e-12), name
            assert [row["train/lr"] for row in rows] == pytest.approx(rates, rel=1e-12), name
            sizes = [end - first for first, end in STEPS]
            assert [row["train/step_samples"] for row in rows] == sizes, name
            assert samples == sum(sizes), name
            if rank < 2:  # the first rank has the whole model
                torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


once = pytest.mark.xdist_group("growing steps")  # the ranks run once


@once
def test_steps_of_growing_windows_are_those_of_plain_pytorch():
    assert_equal_steps(trainings())


@pytest.mark.slow
def test_steps_of_growing_windows_are_those_of_plain_pytorch_under_hybrid():
    results = run_ranks(train, 4, "hybrid")
    assert_equal_steps([{}, *results[:1]])


@once
def test_parameters_move_at_the_end_of_a_window_alone_in_each_phase():
    lengths = [(end - first) // BATCH for first, end in STEPS]
    expected = []
    for step, length in enumerate(lengths, 1):
        expected += [(step, number, length, number == length) for number in range(1, length + 1)]
    for by_plugin in trainings():
        for name, (*_, table) in by_plugin.items():
            assert table == expected, name
