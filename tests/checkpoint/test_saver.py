"""A training saves the right checkpoints at the right steps, and keeps the right ones."""

import errno
import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner import CheckpointSaver, Trainer
from runner.booster import SinglePlugin
from runner.checkpoint import folder as checkpoints
from runner.checkpoint import saver as saver_module
from runner.config import disk
from runner.config.problem import Stopped
from runner.data.dataset import TensorPairs
from tests.distributed.training import Rows

SAMPLES, BATCH = 40, 4
"""Ten steps an epoch."""


def trainer(steps=23, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    data = TensorPairs(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)))
    settings = {
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.1),
        "eval_dataloader": SinglePlugin().prepare_dataloader(data, BATCH),
        "eval_interval": "3ba",
        "stop": lambda: 0,
    }
    loader = SinglePlugin().prepare_dataloader(data, BATCH, shuffle=True, seed=3)
    return Trainer(model, loader, f"{steps}ba", **settings | options)


def names(folder):
    return sorted(one.name for one in folder.iterdir())


def steps_of(folder):
    return [int(one.name.removeprefix("step_")) for one in reversed(checkpoints.found(folder))]


def manifest(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())


@pytest.mark.parametrize("keep", [1, 2, 9])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_and_the_best_are_kept(tmp_path, keep, asynchronous):
    rows = Rows()
    saver = CheckpointSaver(
        tmp_path, "5ba", keep=keep, best="eval/loss", asynchronous=asynchronous, about={"a": 1}
    )
    trainer(saver=saver, sinks=[rows]).fit()
    evaluated = {row["train/step"]: row["eval/loss"] for row in rows.rows if "eval/loss" in row}
    last = {
        step: min((step - at, loss) for at, loss in evaluated.items() if at <= step)[1]
        for step in (5, 10, 15, 20)
    }
    best = min(last, key=lambda step: (last[step], step))
    assert steps_of(tmp_path) == sorted({*list(last)[-keep:], best})
    assert names(tmp_path)[0] == "final"
    assert len(names(tmp_path)) == len(steps_of(tmp_path)) + 1  # nothing unfinished
    for step in steps_of(tmp_path):
        said = checkpoints.require_whole(tmp_path / f"step_{step:09d}")
        assert said["metrics"]["eval/loss"] == last[step]
        assert (said["a"], said["step"], said["world_size"]) == (1, step, 1)
    final = checkpoints.require_whole(tmp_path / "final")
    assert (final["step"], final["metrics"]["eval/loss"]) == (23, evaluated[23])


@pytest.mark.parametrize(
    ("interval", "steps"),
    [("1ep", [10, 20]), ("32sp", [8, 16]), ("7ba", [7, 14, 21]), (None, []), ("600min", [])],
)
def test_any_unit_counts(tmp_path, interval, steps):
    trainer(saver=CheckpointSaver(tmp_path, interval, keep=9)).fit()
    assert steps_of(tmp_path) == steps
    assert (tmp_path / "final").is_dir()


def test_minutes_are_those_of_the_clock(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 10))
    # Threads of other tests read the real clock.
    monkeypatch.setattr(saver_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trainer(saver=CheckpointSaver(tmp_path, "1min", keep=9, save_final=False)).fit()
    # Ten seconds a look, and one more for each checkpoint.
    assert steps_of(tmp_path) == [6, 12, 18]


def test_nothing_is_saved_where_nothing_is_kept(tmp_path):
    trainer(saver=CheckpointSaver(tmp_path / "none", "5ba", keep=0, save_final=False)).fit()
    assert not (tmp_path / "none").exists()


def weights(one):
    return {name: tensor.clone() for name, tensor in one.booster.state_dict(one.model).items()}


def test_the_final_weights_are_those_of_the_end(tmp_path):
    made = trainer(saver=CheckpointSaver(tmp_path, None))
    made.fit()
    wanted = weights(made)
    from safetensors.torch import load_file

    held = {}
    for file in (tmp_path / "final").glob("*.safetensors"):
        held |= load_file(file)
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(held[name], tensor), name
    with pytest.raises(ValueError, match="weights alone"):
        trainer().load(tmp_path / "final")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_that_is_asked_to_stop_saves_and_continues_later(tmp_path, asynchronous):
    whole = trainer()
    whole.fit()
    saver = CheckpointSaver(tmp_path, "9ba", asynchronous=asynchronous)
    stopped = trainer(saver=saver)
    stopped._between.stop = lambda: 10 if stopped.state.progress.step >= 12 else 0
    with pytest.raises(Stopped) as caught:
        stopped.fit()
    assert caught.value.signal == 10
    assert steps_of(tmp_path) == [9, 13]
    again = trainer()
    again.load(tmp_path / "step_000000013")
    again.fit()
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(again)[name], tensor), name


def test_a_training_that_has_ended_has_not_stopped(tmp_path):
    made = trainer(saver=CheckpointSaver(tmp_path, None))
    made._between.stop = lambda: 15 if made.state.progress.step == 22 else 0
    assert made.fit()["steps"] == 23
    assert names(tmp_path) == ["final"]


def test_without_a_saver_it_stops_too():
    made = trainer(stop=lambda: 15)
    with pytest.raises(Stopped):
        made.fit()
    assert made.state.progress.step == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_named_and_the_former_checkpoint_stays(tmp_path, monkeypatch, asynchronous):
    complete = checkpoints.complete

    def full(part, about):
        if about["step"] == 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return complete(part, about)

    monkeypatch.setattr(checkpoints, "complete", full)
    rows = Rows()
    saver = CheckpointSaver(tmp_path, "5ba", asynchronous=asynchronous)
    with pytest.raises(OSError, match=f"no checkpoint can be written to {tmp_path}") as caught:
        trainer(saver=saver, sinks=[rows]).fit()
    assert caught.value.errno == errno.ENOSPC
    assert f"the disk {disk.mount_of(tmp_path)} is full after" in str(caught.value)
    # An asynchronous write has failed by the next step, or shows at the next checkpoint.
    assert 10 <= len(rows.rows) <= (15 if asynchronous else 10)
    assert names(tmp_path) == ["step_000000005"]
    again = trainer()
    again.load(tmp_path / "step_000000005")


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(1000, 0, 1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs [\d.]+ kB, but the disk /.* has 1 kB left"):
        trainer(saver=CheckpointSaver(tmp_path, "5ba")).fit()
    assert names(tmp_path) == []


def test_checkpoints_of_a_later_step_belong_to_a_course_that_was_left(tmp_path):
    trainer(20, saver=CheckpointSaver(tmp_path, "5ba", keep=9)).fit()
    again = trainer(12, saver=CheckpointSaver(tmp_path, "1ba", keep=2))
    again.load(tmp_path / "step_000000010")
    again.fit()
    assert steps_of(tmp_path) == [11, 12]


KILLED = """
import os, signal, sys
from pathlib import Path
from runner import CheckpointSaver
from runner.checkpoint import folder
from tests.checkpoint.test_saver import trainer

moment, path = sys.argv[1], Path(sys.argv[2])
steps = []

def planted(of, name, after=False):
    real = getattr(of, name)
    def dying(*args, **options):
        if len(steps) == 2 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(of, name, dying)

begin = folder.begin
def counted(*args):
    steps.append(args)
    return begin(*args)
folder.begin = counted
from torch.distributed.checkpoint import filesystem
{
    "before tensors": lambda: planted(filesystem.FileSystem, "create_stream"),
    "inside tensors": lambda: planted(filesystem, "_write_item"),
    "after tensors": lambda: planted(filesystem, "_write_files_from_queue", True),
    "before manifest": lambda: planted(folder, "complete"),
    "inside manifest": lambda: planted(folder, "encode", True),
    "before rename": lambda: planted(Path, "rename"),
    "after rename": lambda: planted(Path, "rename", True),
}[moment]()
trainer(saver=CheckpointSaver(path, "5ba", keep=1, asynchronous=sys.argv[3] == "True")).fit()
"""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "moment",
    [
        *("before tensors", "inside tensors", "after tensors", "before manifest"),
        *("inside manifest", "before rename", "after rename"),
    ],
)
@pytest.mark.product(every=5)
def test_a_write_that_is_killed_leaves_the_checkpoint_before_it(tmp_path, moment, asynchronous):
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", KILLED, moment, str(tmp_path), str(asynchronous)]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    whole = trainer()
    whole.fit()
    newest, _ = next(checkpoints.whole(tmp_path))
    assert newest.name == ("step_000000010" if moment == "after rename" else "step_000000005")
    again = trainer(saver=CheckpointSaver(tmp_path, "5ba", keep=1))
    again.load(newest)
    again.fit()
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(again)[name], tensor), name
    assert names(tmp_path) == ["final", "step_000000020"]


FULL = """
import shutil, sys
from pathlib import Path
from runner import CheckpointSaver
from runner.checkpoint import content
from tests.checkpoint.test_saver import names, trainer

folder = Path(sys.argv[1])
asynchronous, moment = sys.argv[2] == "True", sys.argv[3]
if moment == "while tensors are written":
    content.require_space = lambda folder, tensors: None
made = trainer(saver=CheckpointSaver(folder, "5ba", keep=2, asynchronous=asynchronous))
step = made._step
def filling(*args):
    step(*args)
    if made.state.progress.step == 8:
        made.saver.wait()
        free = shutil.disk_usage(folder).free
        rest = 16384 if moment == "while the state is written" else 0
        (folder.parent / "other").write_bytes(b"x" * (free - rest))
made._step = filling
try:
    made.fit()
except OSError as error:
    print(error.errno, error, names(folder), sep="|")
trainer().load(folder / "step_000000005")
"""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "moment",
    ["before the write", "while tensors are written", "while the state is written"],
)
@pytest.mark.product(every=3)
def test_a_disk_that_fills_up_is_named(tmp_path, asynchronous, moment):
    mount = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*mount, "mount -t tmpfs none /mnt"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    root = Path(__file__).resolve().parents[2]
    script = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    home = tmp_path / "checkpoints"
    words = [sys.executable, "-c", FULL, str(home), str(asynchronous), moment]
    done = subprocess.run(
        [*mount, script, str(tmp_path), *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    number, message, left = done.stdout.strip().split("|")
    assert int(number) == errno.ENOSPC
    assert f"no checkpoint can be written to {home}" in message
    assert f"the disk {tmp_path} " in message
    assert left == "['step_000000005']"
