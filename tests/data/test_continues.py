"""A training continues on any stream or loader with the same samples and the same steps."""

import copy
import random
from itertools import chain, product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from runner import Booster, Evaluate, Log, Trainer
from runner.booster.plugin import SinglePlugin, TorchDDPPlugin
from runner.data.order import RandomState
from tests.data.test_stream import Stated
from tests.distributed.training import Rows
from tests.ranks import run_ranks
from tests.train.test_state import timeless

SAMPLES, BATCH, STEPS = 12, 3, 10
"""Four steps an epoch: a training of 10 steps ends in the third epoch."""


class Numbers(Dataset):
    """Numbered samples with noise of all three global generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(2) + random.random() + np.random.rand()
        return torch.cat([torch.tensor([float(index)]), noise]), index % 3


class LateSampler(Sampler):
    """Draws each index when it is asked for, from the global generators."""

    def __iter__(self):
        remaining = list(range(SAMPLES))
        while remaining:
            draw = int(torch.randint(len(remaining), ())) + random.randrange(len(remaining))
            yield remaining.pop(draw % len(remaining))

    def __len__(self):
        return SAMPLES


class LateBatches(LateSampler):
    def __iter__(self):
        indices = super().__iter__()
        yield from zip(*[indices] * BATCH, strict=True)

    def __len__(self):
        return SAMPLES // BATCH


ORDERS = {
    "shuffle": lambda: {"batch_size": BATCH, "shuffle": True},
    "generator": lambda: {
        "batch_size": BATCH,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(4),
    },
    "own sampler": lambda: {"batch_size": BATCH, "sampler": LateSampler()},
    "own batch sampler": lambda: {"batch_sampler": LateBatches()},
}
WORKERS = [(0, False), (1, False), (1, True), (2, False), (2, True)]


class Saving(Trainer):
    """Keeps a copy of weights and state after each step."""

    def _step(self, *args):
        super()._step(*args)
        state = self.model.unwrap().state_dict(), self.state.state_dict()
        self.saved[self.state.progress.step] = copy.deepcopy(state)


class Recorded(nn.Sequential):
    """Keeps the numbers of the samples that it is trained on."""

    def forward(self, inputs):
        if self.training:
            self.seen.append(inputs[:, 0].tolist())
        return super().forward(inputs / 10)


def trainer_on(loader, held_out=None, steps=STEPS, booster=None):
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    model = Recorded(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    model.seen = []
    rows = Rows()
    evaluate = Evaluate(held_out, interval="3ba")
    more = {"log": Log([rows], bar=False), "booster": booster}
    trainer = Saving(model, loader, f"{steps}ba", (), evaluate, **more)
    trainer.saved = {}
    trainer.rows = rows.rows
    trainer.seen = model.seen
    return trainer


def assert_continues(make, after=(3, 4, 7), steps=STEPS):
    """Compare runs that continue after these steps with one that is never stopped."""
    whole = trainer_on(*make(), steps=steps)
    whole.fit()
    for step in after:
        second = trainer_on(*make(), steps=steps)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        weights, state = whole.saved[step]
        second.model.unwrap().load_state_dict(weights)
        second.state.load_state_dict(state)
        second.fit()
        assert second.seen == whole.seen[step:], step
        assert list(map(timeless, second.rows)) == list(map(timeless, whole.rows))[step:], step
        assert all(map(torch.equal, second.model.parameters(), whole.model.parameters())), step
    return whole


def plain():
    return DataLoader(Numbers(), BATCH)


def torch_loader(order, workers, persistent, kind=DataLoader):
    options = ORDERS[order]()
    return kind(Numbers(), num_workers=workers, persistent_workers=persistent, **options)


TABLE = [
    *product([DataLoader], ORDERS, WORKERS),
    *product([StatefulDataLoader], ["shuffle", "own sampler"], WORKERS[:3]),
]
CHEAP = [(DataLoader, "shuffle", (1, True)), (DataLoader, "own sampler", (0, False))]


def cases(table, cheap):
    return [
        case if case in cheap else pytest.param(*case, marks=pytest.mark.slow) for case in table
    ]


@pytest.mark.parametrize(("kind", "order", "workers"), cases(TABLE, CHEAP))
def test_a_training_continues_on_a_loader_of_torch(kind, order, workers):
    whole = assert_continues(lambda: (torch_loader(order, *workers, kind), plain()))
    for first in (0, 4):
        assert sorted(chain(*whole.seen[first : first + 4])) == list(range(SAMPLES))


@pytest.mark.parametrize(("kind", "order", "workers"), cases(TABLE, CHEAP[:1]))
def test_a_training_continues_with_the_same_evaluations(kind, order, workers):
    assert_continues(lambda: (plain(), torch_loader(order, *workers, kind)), after=(2, 7))


def table_of(first=0, samples=40, shards=4):
    library = pytest.importorskip("datasets")
    rows = {"x": [float(number) for number in range(first, first + samples)]}
    return library.Dataset.from_dict(rows).to_iterable_dataset(num_shards=shards)


def interleaved(*parts):
    return pytest.importorskip("datasets").interleave_datasets(list(parts))


def doubled(row):
    return {"x": row["x"] * 2}


def noisy(rows):
    return {"x": [number + random.random() for number in rows["x"]]}


STREAMS = {
    "plain": table_of,
    "map": lambda: table_of().map(doubled),
    "map with random numbers": lambda: table_of().map(noisy, batched=True, batch_size=7),
    "filter": lambda: table_of().filter(lambda row: row["x"] % 3 > 0),
    "interleave": lambda: interleaved(table_of(), table_of(100)),
    "shuffle": lambda: table_of().shuffle(seed=1, buffer_size=16),
    "shuffle, map, filter": lambda: (
        table_of()
        .shuffle(seed=1, buffer_size=16)
        .map(doubled)
        .filter(lambda row: row["x"] % 3 > 0)
        .with_format("torch")
    ),
    "interleave of shuffle": lambda: interleaved(
        table_of().shuffle(seed=1, buffer_size=16), table_of(100).map(doubled)
    ),
}


def collate(rows):
    numbers = torch.tensor([float(row["x"]) for row in rows])
    noise = torch.rand(len(rows), 2)
    return torch.cat([numbers[:, None], noise], 1), (numbers % 3).long()


def stream_loader(kind, workers):
    return SinglePlugin().prepare_dataloader(
        STREAMS[kind](), 4, seed=3, num_workers=workers, collate_fn=collate
    )


@pytest.mark.parametrize(
    ("kind", "workers"), cases([*product(STREAMS, (0, 1, 2))], [("shuffle", 0)])
)
def test_a_training_continues_on_a_stream_of_datasets(kind, workers):
    per_epoch = len([*STREAMS[kind]()]) // 4
    steps = 2 * per_epoch + 3
    after = (3, per_epoch - 1, per_epoch + 3)
    assert_continues(
        lambda: (stream_loader(kind, workers), stream_loader("shuffle", 0)), after, steps
    )


def continue_on_two_ranks():
    """Return what is read by runs of two ranks that continue, and by one that is never stopped."""
    plugin = TorchDDPPlugin()
    results = []
    for shards in (1, 4):  # divided by the runner, and by the stream's method ``shard``

        def make(shards=shards):
            stream = table_of(samples=80, shards=shards).shuffle(seed=1, buffer_size=16)
            loader = plugin.prepare_dataloader(stream, 4, seed=3, collate_fn=collate)
            return trainer_on(loader, steps=23, booster=Booster(plugin=plugin))

        whole = make()
        whole.fit()
        for step in (4, 14):
            second = make()
            weights, state = whole.saved[step]
            second.model.unwrap().load_state_dict(weights)
            second.state.load_state_dict(state)
            second.fit()
            results.append((second.seen, whole.seen[step:], whole.seen))
    return results


@pytest.mark.slow
def test_two_ranks_continue_on_a_stream_with_a_shuffle_buffer():
    for mine, theirs in zip(*run_ranks(continue_on_two_ranks, 2), strict=True):
        for resumed, expected, _ in (mine, theirs):
            assert resumed == expected
        epochs = [
            sorted(chain(*mine[2][first : first + 10], *theirs[2][first : first + 10]))
            for first in (0, 10)
        ]
        assert epochs == [list(range(80))] * 2
        assert mine[2][:10] != mine[2][10:20]


def test_a_stream_that_is_its_own_held_out_data_is_refused():
    stream = Stated()
    loaders = [SinglePlugin().prepare_dataloader(stream, 4) for _ in range(2)]
    with pytest.raises(ValueError, match="make it twice"):
        trainer_on(*loaders)


def test_an_evaluation_leaves_all_generators_as_they_were():
    generator = torch.Generator().manual_seed(4)
    loaders = [
        DataLoader(Numbers(), BATCH, shuffle=True),
        DataLoader(Numbers(), BATCH, shuffle=True, generator=generator, num_workers=1),
        SinglePlugin().prepare_dataloader(Numbers(), BATCH, num_workers=1),
    ]
    for loader in loaders:
        trainer = trainer_on(plain(), loader)
        np.random.normal()  # NumPy keeps the second of a pair
        before = RandomState.now({"own": generator}).state_dict()
        for _ in range(2):
            assert trainer.evaluate()
            after = RandomState.now({"own": generator}).state_dict()
            assert list(map(repr, after.items())) == list(map(repr, before.items()))
            assert torch.equal(after["cpu"], before["cpu"])
            assert torch.equal(after["own.own"], before["own.own"])
