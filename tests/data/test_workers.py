"""Worker processes of loaders: the same samples as without, a cheap start, and no orphan."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runner import Trainer
from runner.booster import SinglePlugin
from tests.distributed.training import Rows
from tests.process import ROOT, wait_for
from tests.train.test_state import timeless

SAMPLES, BATCH = 22, 4


class Changing(Dataset):
    """Samples whose noise is drawn from the global generators, and whose scale is the epoch."""

    def __init__(self, noise=True):
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self.noise, self.epoch = noise, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        inputs = self.inputs[index] * (1 + self.epoch)
        if self.noise:
            inputs = inputs + torch.rand(6) + random.random() + np.random.rand()
        return inputs, torch.tensor(index % 3)


class ChangingBatches(Changing):
    """The same, read a batch at a time."""

    def __getitems__(self, indices):
        inputs = self.inputs[list(indices)] * (1 + self.epoch)
        if self.noise:
            inputs = inputs + torch.rand_like(inputs) + random.random() + np.random.rand()
        return inputs, torch.tensor([index % 3 for index in indices])


def trainer(rows, workers, data=Changing, noise=True, steps=15, **options):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3))
    plugin = SinglePlugin()

    def loader(**more):
        read = data(noise)
        return plugin.prepare_dataloader(
            read, BATCH, seed=5, num_workers=workers, **more, **options
        )

    return Trainer(
        model,
        loader(shuffle=True),
        f"{steps}ba",
        eval_dataloader=loader(),
        eval_interval="4ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        sinks=[rows],
    )


def rows_of(workers, **options):
    rows = Rows()
    trainer(rows, workers, **options).fit()
    assert len(rows.rows) == options.get("steps", 15)
    return [timeless(row) for row in rows.rows]


@pytest.mark.parametrize("data", [Changing, ChangingBatches])
def test_workers_read_what_one_process_reads_in_every_epoch(data):
    # Dropout, and four evaluations: the random numbers of the model are the same too.
    assert rows_of(2, data=data, noise=False) == rows_of(0, data=data, noise=False)


def test_a_fork_server_reads_the_same():
    wanted = rows_of(0, noise=False, steps=7)
    assert rows_of(1, noise=False, steps=7, multiprocessing_context="forkserver") == wanted


@pytest.mark.parametrize("data", [Changing, ChangingBatches])
def test_random_transforms_do_not_depend_on_the_workers(data):
    assert rows_of(1, data=data) == rows_of(2, data=data)


@pytest.mark.parametrize("step", [6, 8])  # at the end of the first epoch, and inside the second
@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_training_reads_the_same(step, workers, tmp_path):
    rows, resumed = Rows(), Rows()
    first, second = trainer(rows, 2), trainer(resumed, workers)
    take = first._step

    def saving(*args):
        take(*args)
        if first.state.progress.step == step:
            first.save(tmp_path)

    first._step = saving
    first.fit()
    second.load(tmp_path / f"step_{step:09d}")
    second.fit()
    assert list(map(timeless, resumed.rows)) == list(map(timeless, rows.rows))[step:]


def test_noise_changes_with_the_epoch_and_a_look_at_a_sample_draws_nothing():
    plugin = SinglePlugin()
    loader = plugin.prepare_dataloader(Changing(), BATCH, seed=5, num_workers=1)
    loader.dataset.dataset.inputs.zero_()
    epochs = []
    for epoch in (0, 1):
        loader.batch_sampler.set_epoch(epoch)
        epochs.append(torch.cat([inputs for inputs, _ in loader]))
    assert (epochs[0] != epochs[1]).all()
    assert epochs[0].unique().numel() == epochs[0].numel()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plain = Changing(noise=False)
    plugin.prepare_dataloader(plain, BATCH, num_workers=1).dataset[0]
    assert torch.equal(torch.get_rng_state(), before)


HELD = """
import sys, torch
from runner.booster import SinglePlugin
from runner.data import TensorPairs

loader = SinglePlugin().prepare_dataloader(
    TensorPairs(torch.zeros(64, 2), torch.zeros(64)), 4, num_workers=2, **{options}
)
if __name__ == "__main__":
    batches = iter(loader)
    next(batches), next(batches)  # one of each worker
    workers = [worker.pid for worker in batches._workers]
    print(*workers, flush=True)
    for line in sys.stdin:  # ends when the test closes it
        if line == "read\\n":
            assert len(list(batches)) == 14
            print("read", flush=True)
"""


class Holder:
    """A process of its own that holds a loader with two workers."""

    def __init__(self, folder, **options):
        (folder / "holds.py").write_text(HELD.format(options=options))
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "holds.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers = [int(word) for word in self.process.stdout.readline().split()]
        assert len(self.workers) == 2

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in (self.process.pid, *self.workers):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(120)
        self.process.stdin.close()
        self.process.stdout.close()


def assert_gone(pids):
    left = lambda: [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # noqa: E731
    wait_for(lambda: not left(), shown=left)


def took_signals(pid):
    """Return whether no signal is on its way to a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return not any(int(word, 16) for word in re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)", status, re.M))


METHODS = [{}, {"multiprocessing_context": "forkserver"}]


@pytest.mark.parametrize("options", METHODS)
@pytest.mark.product(every=2)
def test_workers_end_with_their_training_process(tmp_path, options):
    with Holder(tmp_path, **options) as held:
        held.process.kill()
        held.process.wait(120)
        assert_gone(held.workers)


@pytest.mark.parametrize("options", METHODS)
@pytest.mark.product(every=2)
def test_signals_to_all_processes_leave_workers_to_the_training_process(tmp_path, options):
    with Holder(tmp_path, **options) as held:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            for worker in held.workers:
                os.kill(worker, number)
        wait_for(lambda: all(map(took_signals, held.workers)))
        held.process.stdin.write("read\n")
        held.process.stdin.flush()
        assert held.process.stdout.readline() == "read\n"
        held.process.stdin.close()  # the training process ends by itself
        assert held.process.wait(120) == 0
        assert_gone(held.workers)


def descendants(marker):
    """Process ids of all processes that have ``marker`` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


WORDS = [
    *("-m", "runner", "plugin=ddp", "plugin.nproc=2", "device=cpu", "tracker=none"),
    *("data=synthetic", "data.samples=256", "data.batch_size=4"),
]


@pytest.mark.parametrize("killed", ["launcher", "rank"])
@pytest.mark.product(every=2)
def test_no_worker_is_left_when_a_process_of_a_run_is_killed(killed, tmp_path, outputs):
    marker = f"RUNNER_TEST_MARKER={tmp_path}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RUNNER_TEST_MARKER": str(tmp_path)}
    words = [*WORDS, "data.num_workers=2", "train.max_duration=100000ba", "log.flush=1"]
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, *words, f"hydra.run.dir={folder}"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        begun = lambda: (folder / "metrics.jsonl").exists() and len(descendants(marker)) >= 8  # noqa: E731
        wait_for(lambda: begun() or process.poll() is not None)
        assert process.poll() is None
        victim = process.pid if killed == "launcher" else rank_of(process.pid, marker)
        os.kill(victim, signal.SIGKILL)
        process.wait(120)
    assert_gone(descendants(marker))


def rank_of(launcher, marker):
    """A rank: a process that has workers as children."""
    parents = {}
    for pid in descendants(marker):
        status = Path(f"/proc/{pid}/status").read_text()
        parents.setdefault(int(re.search(r"PPid:\t(\d+)", status)[1]), []).append(pid)
    named = {
        pid: Path(f"/proc/{pid}/comm").read_text().strip()
        for children in parents.values()
        for pid in children
    }
    ranks = [
        parent
        for parent, children in parents.items()
        if parent != launcher and any(named[child] == "pt_data_worker" for child in children)
    ]
    return ranks[0]


# Counts the processor time of all descendants, which fork servers do not hand on.
COUNTED = """
import ctypes, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
code = subprocess.call(sys.argv[1:])
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
sys.exit(code)
"""


@pytest.mark.slow
def test_workers_of_local_ranks_cost_little_and_change_no_row(tmp_path, outputs):
    """Two epochs and two evaluations: each start of 16 workers took two seconds of importing."""
    seconds, rows = {}, {}
    for workers in (0, 2):
        folder = tmp_path / f"{workers}"
        words = [*WORDS, f"data.num_workers={workers}", "train.max_duration=40ba"]
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, sys.executable, *words, f"hydra.run.dir={folder}"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seconds[workers] = float(done.stdout.splitlines()[-1])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows[workers] = [timeless(json.loads(line)) for line in lines]
    assert rows[2] == rows[0]
    assert seconds[2] < 1.6 * seconds[0], seconds
