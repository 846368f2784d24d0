"""Runs and sweeps on a disk of 64 MB that is filled at a chosen moment."""

import ctypes
import subprocess

import pytest

from runner.launch.supervise import write_page
from runner.run_folder.patient_file import PatientFile
from runner.run_folder.status import Record
from tests.filling import fill
from tests.launch.ends import only_run, read, rows_of
from tests.process import inspected, python

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
def run(environment, disk):
    """Run a command that writes to that disk, and return what it prints."""
    filling = "model._target_=tests.filling.Filling"
    environment |= {"RUNNER_OUTPUTS": str(disk / "outputs")}

    def run(*words, at=0, until=0, code=0, fills=True):
        words = ["device=cpu", *SMALL, filling, f"+model.at={at}", f"+model.until={until}", *words]
        seen = environment | {"FILLED": str(disk) if fills else ""}
        done = python("-m", "runner", *words, env=seen, code=code)
        for unwanted in ("Traceback", "Logging error", "Error executing job"):
            assert unwanted not in done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def about_disk(said, disk):
    return [line for line in said.splitlines() if f"the disk {disk} is full" in line]


def test_rows_are_written_when_there_is_space_again(run, disk):
    said = run("plugin=ddp", "plugin.nproc=2", at=5, until=15)
    folder = only_run(disk / "outputs")
    assert [row["train/step"] for row in rows_of(folder)] == list(range(1, 21))
    status = read(folder)
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 20)
    assert read(folder, "summary.json")["steps"] == 20
    assert (folder / "report.html").is_file()
    log = (folder / "runner.log").read_text()
    [warning] = about_disk(said, disk)
    assert "rows of metrics.jsonl" in warning
    assert warning.partition("the disk")[2] in log
    # wandb's client drops what does not fit silently, also after there is space again.
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    is_whole = "exit" in inspected(file)
    assert said.count("wandb's record of this run is not complete") == (not is_whole)
    assert not list(folder.glob(".*.reserve"))


def test_a_run_whose_rows_do_not_fit_trains_to_its_end_and_fails(run, disk):
    said = run("tracker=none", "checkpoint=none", at=5, code=1)
    folder = only_run(disk / "outputs")
    (disk / "filler").unlink()
    written = [row["train/step"] for row in rows_of(folder)]
    assert written == list(range(1, len(written) + 1))
    status = read(folder)
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, 0)
    missing = f"{20 - len(written)} rows of metrics.jsonl could not be written"
    assert status["error"].startswith(f"the disk {disk} is full (0 kB free): {missing}")
    assert [line for line in about_disk(said, disk) if status["error"] in line]


def test_a_sweep_stops_without_weights_and_the_same_command_finishes_it(run, disk):
    sweep = ["-m", "seed=0,1", "sweep.name=full", "tracker=none"]
    said = run(*sweep, at=19, code=1)
    folder = disk / "outputs" / "sweeps" / "full"
    assert said.count("the sweep stops: ") == 1
    assert about_disk(said, disk)
    assert not (folder / "1" / "status.json").exists()
    status = read(folder / "0")
    assert (status["state"], status["step"]) == ("failed", 20)
    assert "no checkpoint can be written" in status["error"]
    assert "\n" not in status["error"]
    (disk / "filler").unlink()
    run(*sweep, at=19, fills=False)
    assert [read(folder / number)["state"] for number in "01"] == ["finished"] * 2
    assert read(folder, "sweep.json")["state"] == "finished"
    assert [row["train/step"] for row in rows_of(folder / "0")] == list(range(1, 21))


def test_a_run_that_begins_on_a_full_disk_creates_nothing(run, disk):
    fill(disk)
    for words in ([], ["-m", "seed=0,1"]):
        said = run(*words, code=2)
        assert "free at least 1.0 MB" in about_disk(said, disk)[0]
        assert not list(disk.glob("outputs/*/*"))


def test_lines_are_kept_and_written_later_none_torn_and_the_oldest_dropped(disk):
    file, line = PatientFile(disk / "lines", most=1000), b"x" * 99 + b"\n"
    (disk / "filler").write_bytes(b"y" * (2**26 - 2**12))  # room for one page
    for number in range(100):
        file.append(b"%099d\n" % number)
    written = 100 - file.missing
    assert 0 < written < 60
    assert (file.error is None, file.size <= 1000) == (False, True)
    (disk / "filler").unlink()
    file.append(line)
    assert (file.missing, file.error, file.size) == (file.dropped, None, 0)
    file.close()
    *numbers, last = (disk / "lines").read_bytes().splitlines(keepends=True)
    assert last == line
    first = written + 1  # a part of this line was written: it is not dropped
    kept = [*range(first), *range(first + file.dropped, 100)]
    assert [int(number) for number in numbers] == kept


def test_the_last_status_is_written_on_a_full_disk_and_a_page_is_one_warning(disk, caplog):
    record = Record(disk)
    record.begin({"seed": 0}, "0" * 16, None)
    fill(disk)
    record.progress(1)
    with pytest.raises(OSError, match=f"the disk {disk} is full .*summary.json"):
        record.summary({"steps": 1})
    record.end("failed", 1, "x" * 10**6, 0)
    status = read(disk)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 1)
    assert {file.name for file in disk.iterdir()} == {"config.yaml", "status.json", "filler"}
    caplog.clear()
    assert write_page(disk) is None
    [line] = caplog.messages
    assert "report.html could not be written" in line
    (disk / "filler").unlink()
    assert write_page(disk) == disk / "report.html"
