"""``data.leave_out``: what is read afterwards is what was read without it, less these samples."""

from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from runner import Booster, Log, SkipRule, Trainer
from runner.booster import SinglePlugin
from runner.config.accumulation import AccumulationSteps
from runner.config.leave_out import LeaveOut, as_ranges
from runner.config.modes import info_of
from runner.data import TensorPairs
from runner.data.order import LeftOut
from runner.telemetry.guidance import Setting, remarks
from runner.train.left_out import left_out_from
from runner.train.progress import Progress
from runner.train.windows import Windows, has_no_sample
from tests.clip.reference import refused

SAMPLES = 50
DATA = TensorPairs(torch.arange(float(SAMPLES)).view(-1, 1), torch.zeros(SAMPLES, 1))
ONE = AccumulationSteps.of(1)


def loader_of(rank=0, world=1, batch_size=8, dataset=DATA, **options):
    plugin = SinglePlugin()
    plugin.data_rank = rank
    plugin.data_size = world
    return plugin.prepare_dataloader(dataset, batch_size, shuffle=True, seed=3, **options)


def numbers_in(batch):
    return [int(number) for number in batch[0].flatten()]


def read(epoch, first=0, left_out=None, world=1, **options):
    """What all ranks read in each microbatch of an epoch from ``first`` on."""
    of_ranks = []
    for rank in range(world):
        loader = loader_of(rank, world, 8 // world, **options)
        windows = Windows(loader, lambda: 1)
        windows.left_out = left_out
        batches = []
        if first:  # as of a checkpoint
            next(windows.epoch(epoch))
            windows.load_state_dict(windows.state_dict())
        for window in windows.epoch(epoch, first):
            idle = has_no_sample(loader, window.first)
            batches.append([] if idle else numbers_in(window.batches[0]))
        of_ranks.append(batches)
    return [joined(parts) for parts in zip(*of_ranks, strict=True)]


def joined(lists):
    return list(chain.from_iterable(lists))


def in_batches(numbers):
    return [numbers[first : first + 8] for first in range(0, len(numbers), 8)]


@pytest.mark.parametrize(
    ("world", "workers"),
    [(1, 0), (2, 0), (4, 0), (1, 2), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_the_rest_of_the_data_is_read_in_its_order(world, workers):
    left = LeftOut(epoch=1, start=16, indices=(0, 7, 13, 20, 21, 33, 49))
    options = {"world": world, "num_workers": workers}
    orders = [joined(read(epoch)) for epoch in range(3)]
    assert read(0, left_out=left, **options) == in_batches(orders[0])
    after = [number for number in orders[1][16:] if number not in left.indices]
    assert len(after) < 34
    assert read(1, 2, left, **options) == in_batches(after)
    rest = [number for number in orders[2] if number not in left.indices]
    assert read(2, left_out=left, **options) == in_batches(rest)


@pytest.mark.parametrize("phases", [1, 2, {0: 1, "3ba": 2}])
def test_the_samples_of_steps_are_those_that_a_whole_run_reads(phases):
    accumulation = AccumulationSteps.of(phases)
    steps = []
    progress = Progress()
    for epoch in range(3):
        microbatches = read(epoch)
        while microbatches:
            count = accumulation.at(progress.of)
            steps.append(joined(microbatches[:count]))
            progress = progress._replace(step=len(steps))
            microbatches = microbatches[count:]
    for asked in ([1], ["3..5", 9], [len(steps)]):
        leave_out = LeaveOut(steps=asked)
        found = left_out_from(leave_out, loader_of(), Progress(1, 2, 9), accumulation)
        expected = set().union(*(steps[step - 1] for step in leave_out.steps_left_out))
        assert found == LeftOut(1, 16, tuple(sorted(expected)))


def test_samples_are_named_by_their_index_in_the_whole_data_set():
    share = Subset(DATA, [40, 30, 20, 10])
    loader = loader_of(dataset=share)
    found = left_out_from(LeaveOut(samples=[10, 20]), loader, Progress(), ONE)
    assert found.indices == (2, 3)


def test_a_sample_that_the_data_does_not_have_is_refused():
    asked = LeaveOut(samples=[3, 50])
    refused(ValueError, "has no sample 50", left_out_from, asked, loader_of(), Progress(), ONE)


class Recording(nn.Module):
    """A model that notes what it reads."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps = []

    def forward(self, inputs):
        self.steps.append([int(number) for number in inputs.flatten()])
        return self.layer(inputs / 50)


def trained(until, path=None, leave_out=None, save=None):
    torch.manual_seed(0)
    model = Recording()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, loader_of(), f"{until}ba", optimizers=sgd, criterion=nn.MSELoss())
    trainer.leave_out = leave_out
    if path is not None:
        trainer.load(path)
    trainer.fit()
    return model, None if save is None else trainer.save(save)


def test_a_branch_that_is_stopped_goes_on_without_the_samples(tmp_path):
    """Steps 9 and 10 of the run, in the second epoch, are left out from step 5 on."""
    parent, checkpoint = trained(5, save=tmp_path / "parent")
    whole, _ = trained(21)
    assert whole.steps[:5] == parent.steps
    left_out = {*whole.steps[8], *whole.steps[9]}
    asked = LeaveOut(steps=[9, 10])
    branch, _ = trained(15, checkpoint, asked)
    epochs = [joined(whole.steps[:7]), joined(whole.steps[7:14]), joined(whole.steps[14:])]
    rest = [number for number in epochs[0][40:] if number not in left_out]
    expected = in_batches(rest)
    for epoch in epochs[1:]:
        expected += in_batches([number for number in epoch if number not in left_out])
    assert branch.steps == expected[: len(branch.steps)]
    first, middle = trained(11, checkpoint, asked, save=tmp_path / "branch")
    second, _ = trained(15, middle, asked)
    assert first.steps + second.steps == branch.steps
    assert torch.equal(second.layer.weight, branch.layer.weight)


def with_bad_sample(seed, leave_out=None):
    """A training of four epochs on data of which one sample has a large gradient."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 1, generator=generator)
    inputs[seed % SAMPLES] = 1000.0
    dataset = TensorPairs(inputs, torch.randn(SAMPLES, 1, generator=generator))
    torch.manual_seed(seed)
    model = nn.Linear(1, 1)
    loader = SinglePlugin().prepare_dataloader(dataset, 8, shuffle=True, seed=seed)
    booster = Booster(skip=SkipRule("constant", k=100.0))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"booster": booster, "criterion": nn.MSELoss(), "optimizers": sgd}
    trainer = Trainer(model, loader, "4ep", **options, log=Log(bar=False))
    trainer.leave_out = leave_out
    return trainer.fit()


def test_leaving_out_a_step_that_was_skipped_ends_the_spikes_of_its_sample():
    for seed in range(20):
        summary = with_bad_sample(seed)
        assert summary["clip/skipped"] == len(summary["skipped_steps"]) == 4
        first = summary["skipped_steps"][0]
        assert all(seed in step["samples"] for step in summary["skipped_steps"])
        [common] = set.intersection(*(set(step["samples"]) for step in summary["skipped_steps"]))
        assert common == seed
        [remark] = [
            r for r in remarks(summary, Setting(info_of("none"), None)) if r.topic == "samples"
        ]
        assert f"data.leave_out=[{first['step']}" in remark.text
        for asked in (LeaveOut(steps=[first["step"]]), LeaveOut(samples=[seed])):
            assert with_bad_sample(seed, asked)["clip/skipped"] == 0


def test_ranges_are_written_as_they_are_read():
    for numbers in ([5], [3, 4], [1, 2, 3, 9, 11, 12]):
        text = as_ranges(reversed(numbers))
        given = [int(part) if part.isdigit() else part for part in text.split(",")]
        assert sorted(LeaveOut(steps=given).steps_left_out) == numbers
