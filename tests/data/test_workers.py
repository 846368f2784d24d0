"""Worker processes of loaders: the same samples as without, and no orphan."""

import gc
import multiprocessing
import os
import random
import re
import subprocess
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from runner import CheckpointSaver, Evaluate, Log, Trainer
from runner.booster import SinglePlugin
from runner.config.notation import in_one_line
from runner.data import TensorPairs
from runner.data.dataset import own
from runner.data.workers import DataError, arrived
from tests.distributed.training import Rows
from tests.process import wait_for
from tests.ranks import PRELOAD
from tests.train.test_state import timeless

SAMPLES, BATCH = 22, 4


class Changing(Dataset):
    """Samples whose noise is drawn from the global generators, and whose scale is the epoch."""

    epoch = 0

    def __init__(self, noise=True):
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        inputs = self.inputs[index] * (1 + self.epoch)
        if self.noise:
            inputs = inputs + torch.rand_like(inputs) + random.random() + np.random.rand()
        return inputs, torch.as_tensor(index) % 3


class ChangingBatches(Changing):
    """The same, read a batch at a time."""

    def __getitems__(self, indices):
        return self[list(indices)]


def trainer(rows, workers, data=Changing, noise=True, callbacks=(), **options):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3))
    options = {"seed": 5, "num_workers": workers, **options}
    train, held_out = (
        SinglePlugin().prepare_dataloader(data(noise), BATCH, shuffle=shuffle, **options)
        for shuffle in (True, False)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    more = {"log": Log([rows]), "callbacks": callbacks}
    return Trainer(model, train, "15ba", (), Evaluate(held_out, (), "4ba"), sgd, **more)


def rows_of(workers, **options):
    rows = Rows()
    trainer(rows, workers, **options).fit()
    assert len(rows.rows) == 15
    return [timeless(row) for row in rows.rows]


@pytest.mark.parametrize("data", [Changing, ChangingBatches])
def test_workers_read_what_one_process_reads_in_every_epoch(data):
    # Dropout, and four evaluations: the random numbers of the model are the same too.
    assert rows_of(2, data=data, noise=False) == rows_of(0, data=data, noise=False)


def test_workers_of_a_fork_server_draw_the_same_random_transforms():
    multiprocessing.set_forkserver_preload(PRELOAD)
    assert rows_of(1, multiprocessing_context="forkserver") == rows_of(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_that_are_read_at_once_have_the_random_transforms_of_their_samples(workers):
    assert rows_of(workers, data=ChangingBatches) == rows_of(2, data=ChangingBatches)


def test_a_resumed_training_reads_the_same(tmp_path):
    rows = Rows()
    trainer(rows, 2, callbacks=[CheckpointSaver(tmp_path, "2ba", keep=9)]).fit()
    for step, workers in ((6, 1), (8, 2)):  # between and inside epochs
        resumed = Rows()
        second = trainer(resumed, workers)
        second.load(tmp_path / f"step_{step:09d}")
        second.fit()
        assert list(map(timeless, resumed.rows)) == list(map(timeless, rows.rows))[step:]


@cache
def noise_of_two_epochs():
    loader = SinglePlugin().prepare_dataloader(Changing(), BATCH, seed=5, num_workers=1)
    loader.dataset.dataset.inputs.zero_()
    epochs = []
    for epoch in (0, 1):
        loader.batch_sampler.set_epoch(epoch)
        epochs.append(torch.cat([inputs for inputs, _ in loader]))
    return epochs


def test_noise_changes_with_the_epoch():
    first, second = noise_of_two_epochs()
    assert (first != second).all()


def test_noise_changes_with_the_sample():
    first, _ = noise_of_two_epochs()
    assert first.unique().numel() == first.numel()


def assert_gone(pids):
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def took_signals(pid):
    """Return whether no signal is on its way to a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return not any(int(word, 16) for word in re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)", status, re.M))


def begun():
    """Return batches of two workers, both of which have read one, and the ids of the workers."""
    data = TensorPairs(torch.zeros(64, 2), torch.zeros(64))
    before = multiprocessing.active_children()
    batches = iter(SinglePlugin().prepare_dataloader(data, 4, num_workers=2))
    next(batches), next(batches)
    workers = [
        process.pid for process in multiprocessing.active_children() if process not in before
    ]
    assert len(workers) == 2
    return batches, workers


def test_signals_to_all_processes_leave_workers_to_the_training_process():
    batches, workers = begun()
    for name in ("INT", "TERM", "HUP", "USR1"):  # from another process than the parent
        subprocess.run(["kill", f"-{name}", *map(str, workers)], check=True)
    wait_for(lambda: all(map(took_signals, workers)))
    assert len(list(batches)) == 14
    del batches
    assert_gone(workers)


def test_workers_of_a_loader_in_a_cycle_of_garbage_are_told_to_end(monkeypatch):
    monkeypatch.delattr(_MultiProcessingDataLoaderIter, "__del__")  # it would wait for them
    batches, workers = begun()
    cycle = [batches]
    cycle.append(cycle)
    del batches, cycle
    gc.collect()
    children = multiprocessing.active_children  # which also reaps those that have ended
    wait_for(lambda: not any(process.pid in workers for process in children()))


def hold(pipe):
    """Send the process ids of two workers, and wait to be killed."""
    _batches, workers = begun()
    pipe.send(workers)
    pipe.recv()


def test_workers_end_with_a_training_process_that_is_killed():
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    assert ours.poll(120)
    workers = ours.recv()
    process.kill()
    process.join(120)
    assert_gone(workers)


class Bad(Dataset):
    """Fails at sample 6, in the way that ``fault`` says."""

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index == 6:
            match self.fault:
                case "raise":

                    class LocalError(Exception):
                        """Cannot be pickled, as it is defined in a function."""

                    raise LocalError("planted error") from KeyError("planted cause")
                case "exit":
                    raise SystemExit(3)
                case "die":
                    os._exit(3)
                case "die late":
                    time.sleep(0.3)
                    os._exit(3)
                case "none":
                    return None
                case "function":
                    return torch.zeros(2), lambda: 1
                case "hang":
                    time.sleep(600)
        return torch.zeros(2), torch.zeros(())


class BadStream(Bad, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(SAMPLES))


def listed(samples):
    return torch.stack([inputs for inputs, _ in samples]), [target for _, target in samples]


def error_of(dataset, workers=1, **options):
    with pytest.raises(DataError) as raised:
        list(SinglePlugin().prepare_dataloader(dataset, BATCH, num_workers=workers, **options))
    return str(raised.value)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            "raise",
            "sample 6, worker 0: .*LocalError: planted error; from KeyError: 'planted cause'",
        ),
        ("exit", "sample 6, worker 0: SystemExit: 3"),
        ("none", "sample 6, worker 0: TypeError: the sample is None"),
        ("function", "samples 4, 5, 6, 7, worker 0: TypeError: a batch holds function, which"),
    ],
)
def test_a_sample_that_a_worker_cannot_read_is_named(fault, text):
    options = {"collate_fn": listed} if fault == "function" else {}
    assert re.match(f"data set Bad, {text}", error_of(Bad(fault), **options))


@pytest.mark.parametrize("fault", ["raise", "none"])
def test_the_index_of_a_sample_of_a_share_is_that_in_the_whole_data_set(fault):
    train = own(Bad(fault), eval_fraction=0.5).train
    assert error_of(train).startswith("data set Bad, sample 6, worker 0: ")


def test_a_sample_that_is_none_is_named_without_workers():
    assert error_of(Bad("none"), workers=0) == "data set Bad, sample 6: it is None"


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (own(Bad("raise"), eval_fraction=0.5).train, "data set Bad, sample 6 was read"),
        (BadStream("raise"), "data set BadStream, microbatch 1 was read"),
    ],
)
def test_an_exception_without_workers_has_a_note_that_names_the_sample(dataset, place):
    with pytest.raises(Exception, match="planted error") as raised:
        list(SinglePlugin().prepare_dataloader(dataset, BATCH))
    assert in_one_line(raised.value).endswith(f"; while {place}; from KeyError: 'planted cause'")


def test_an_exception_of_a_stream_arrives_from_its_worker():
    message = error_of(BadStream("raise"))
    assert message.startswith("data set BadStream, microbatch 1, worker 0: ")
    assert "LocalError: planted error; from KeyError: 'planted cause'" in message


def test_a_worker_that_hangs_ends_the_training_by_the_time_out_for_data():
    message = error_of(Bad("hang"), timeout=2)
    assert message.startswith(
        "data set Bad: no batch in 2 s, the time-out for data (launch.timeout)"
    )


def test_a_worker_that_ends_at_once_is_no_mystery():
    assert error_of(Bad("die")).startswith("data set Bad: ")


def cut_off():
    """Fail as a loader does whose worker closes its sockets, and is not gone yet."""
    raise EOFError
    yield


def test_a_worker_that_ends_after_its_batch_was_cut_off_is_told_by_its_exit_code():
    data = Bad("die late")
    workers = iter(SinglePlugin().prepare_dataloader(data, BATCH, num_workers=1))
    next(workers)
    with pytest.raises(DataError, match="exited unexpectedly with exit code 3"):
        next(arrived(cut_off(), data, timeout=0))
