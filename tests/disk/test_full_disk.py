"""Runs and sweeps on a disk of 64 MB that is filled at a chosen moment."""

import ctypes
import subprocess

import pytest

from runner.cli.main import main
from runner.report.page import written
from runner.run_folder.status import Record
from tests.faulty import fill
from tests.launch.ends import faulty, only_run, read, rows_of
from tests.process import environment_at, python

# Only one worker gets mounts of its own.
pytestmark = pytest.mark.xdist_group("disk")

SMALL = ["train.max_duration=20ba", "eval.interval=20ba", "data.batch_size=16", "log.flush=2"]


@pytest.fixture(scope="session")
def own_mounts():
    """What is mounted from now on is seen by this process and its children, and ends with them."""
    private = ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS; os.unshare is new in 3.12
    if not private or subprocess.run(["mount", "--make-rprivate", "/"]).returncode:
        pytest.skip("only root can mount a disk")


@pytest.fixture
def disk(tmp_path, own_mounts):
    """A tmpfs of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def run(outputs, disk, monkeypatch, capsys):
    """Run a command that writes to that disk, and return what it prints."""
    monkeypatch.setenv("RUNNER_OUTPUTS", str(disk / "outputs"))

    def run(*words, at=99, code=0):
        assert main(["device=cpu", *SMALL, *faulty("fill", at, rank=0), *words]) == code
        printed = "".join(capsys.readouterr())
        for unwanted in ("Traceback", "Logging error", "Error executing job"):
            assert unwanted not in printed
        return printed

    return run


def about_disk(said, disk):
    return [line for line in said.splitlines() if f"the disk {disk} is full" in line]


def test_a_run_that_failed_on_a_full_disk_continues_once_there_is_space(run, disk):
    words = [f"hydra.run.dir={disk}/outputs/runs/one", "tracker=none"]
    words += ["checkpoint.interval=2ba", "checkpoint.keep=1"]
    assert about_disk(run(*words, at=5, code=1), disk)
    folder = only_run(disk / "outputs")
    ended = read(folder)  # its file had space for this
    assert (ended["state"], ended["exit_code"], "No space" in ended["error"]) == ("failed", 1, True)
    (disk / "outputs" / "filler").unlink()
    run(*words, at=5)
    assert [row["train/step"] for row in rows_of(folder)] == list(range(1, 21))
    assert read(folder)["state"] == "finished"


def test_a_disk_that_is_full_is_named_by_ranks(disk):
    """Their reason does not travel by the disk. The command's fork server has to see the disk."""
    words = ["plugin=ddp", "plugin.nproc=2", "tracker=none", "checkpoint.interval=2ba"]
    environment = environment_at(disk)
    done = python("-m", "runner", *SMALL, *faulty("fill", 5), *words, code=1, env=environment)
    [line] = [printed for printed in done.stderr.splitlines() if printed.startswith("failed: ")]
    status = read(only_run(disk / "outputs"))
    assert line.startswith(f"failed: rank {status['rank']}: {status['error']}")
    assert f"the disk {disk} is full" in line or "No space left on device" in line
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    for unwanted in ("Traceback", "Logging error"):
        assert unwanted not in done.stdout + done.stderr


def test_a_sweep_that_stopped_on_a_full_disk_is_finished_by_the_same_command(run, disk):
    sweep = ["-m", "seed=0,1", "sweep.name=full", "tracker=none"]
    said = run(*sweep, at=19, code=1)
    folder = disk / "outputs" / "sweeps" / "full"
    assert said.count("the sweep stops: ") == 1
    assert about_disk(said, disk)
    assert not (folder / "1" / "status.json").exists()
    (disk / "outputs" / "filler").unlink()
    run(*sweep, at=19)
    assert [read(folder / number)["state"] for number in "01"] == ["finished"] * 2
    assert read(folder, "sweep.json")["state"] == "finished"
    assert [row["train/step"] for row in rows_of(folder / "0")] == list(range(1, 21))


def test_a_run_that_begins_on_a_full_disk_creates_nothing(run, disk):
    fill(disk)
    for words in ([], ["-m", "seed=0,1"]):
        assert len(about_disk(run(*words, code=1), disk)) == 1
        assert not list(disk.glob("outputs/*/*"))


@pytest.fixture
def filled(disk):
    """The record of a run that began before its disk was full."""
    record = Record(disk)
    record.begin({"seed": 0}, None)
    fill(disk)
    record.write({"train/step": 1})
    return record


def test_a_summary_that_does_not_fit_is_named(filled, disk):
    with pytest.raises(OSError, match=f"the disk {disk} is full.*summary.json"):
        filled.summary({"steps": 1})
    assert {file.name for file in disk.iterdir()} == {"config.yaml", "status.json", "filler"}


@pytest.mark.usefixtures("filled")
def test_a_page_that_does_not_fit_is_named(disk, caplog):
    assert written(disk) is None
    [line] = caplog.messages
    assert "report.html could not be written" in line
    (disk / "filler").unlink()
    assert written(disk) == disk / "report.html"
