"""Runs and sweeps on a disk of 64 MB that is filled at a chosen moment."""

import ctypes
import json
import subprocess
import sys
import time

import pytest

from runner.launch.page import write_page
from runner.run_folder.patient_file import PatientFile
from runner.run_folder.status import Record
from runner.telemetry.sinks.wandb_sink import WandbSink
from tests.filling import fill
from tests.process import python, wait_for

# Only one worker gets mounts of its own.
pytestmark = pytest.mark.xdist_group("disk")

SMALL = ["train.max_duration=20ba", "eval.interval=20ba", "data.batch_size=16", "log.flush=2"]


def mount(*words):
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def own_mounts():
    """What is mounted from now on is seen by this process and its children, and ends with them."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS; os.unshare is new in Python 3.12
        pytest.skip("only root can mount a disk")
    mount("--make-rprivate", "/")


@pytest.fixture
def disk(tmp_path, own_mounts):
    """A tmpfs of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def full(environment, disk):
    """Environment of commands that write to that disk."""
    return environment | {"RUNNER_OUTPUTS": str(disk / "outputs"), "FILLED": str(disk)}


def run(environment, *words, at=0, until=0, code=0):
    filling = ["model._target_=tests.filling.Filling", f"+model.at={at}", f"+model.until={until}"]
    words = ["-m", "runner", "device=cpu", *SMALL, *filling, *words]
    done = python(*words, env=environment, code=code)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "Logging error" not in said
    assert "Error executing job" not in said
    return said


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/step"] for line in lines]


def read(folder, name="status.json"):
    return json.loads((folder / name).read_text())


def the_run(disk):
    (folder,) = (disk / "outputs" / "runs").iterdir()
    return folder


def recorded(folder):
    """Whether wandb's own reader finds the end of the run in its record."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return any('"type":"exit"' in line.replace(" ", "") for line in read.stdout.splitlines())


def about_disk(said, disk):
    return [line for line in said.splitlines() if f"the disk {disk} is full" in line]


@pytest.mark.parametrize(
    "plugin", [["plugin=single"], ["plugin=ddp", "plugin.nproc=2"]], ids=["single", "ddp"]
)
@pytest.mark.product(every=2)
def test_rows_are_written_when_there_is_space_again(full, disk, plugin):
    said = run(full, *plugin, at=5, until=15)
    folder = the_run(disk)
    assert rows_of(folder) == list(range(1, 21))
    status = read(folder)
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 20)
    assert read(folder, "summary.json")["steps"] == 20
    assert (folder / "report.html").is_file()
    log = (folder / "runner.log").read_text()
    assert "finished with exit code 0" in log
    [warning] = about_disk(said, disk)
    assert "rows of metrics.jsonl" in warning
    assert "free at least 1.0 MB" in warning
    assert warning.partition("the disk")[2] in log
    # wandb's client drops what does not fit silently, also after there is space again.
    assert said.count("wandb's record of this run is not complete") == (not recorded(folder))
    assert not list(folder.glob(".*.reserve"))


@pytest.mark.parametrize(
    "plugin", [["plugin=single"], ["plugin=ddp", "plugin.nproc=2"]], ids=["single", "ddp"]
)
@pytest.mark.product(every=2)
def test_a_run_whose_rows_do_not_fit_trains_to_its_end_and_fails(full, disk, plugin):
    said = run(full, *plugin, "tracker=none", "checkpoint=none", at=5, code=1)
    folder = the_run(disk)
    (disk / "filler").unlink()
    written = rows_of(folder)
    assert written == list(range(1, len(written) + 1))
    status = read(folder)
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, 0)
    assert status["error"] == (
        f"the disk {disk} is full (0 kB free): {20 - len(written)} rows of metrics.jsonl "
        "could not be written; free at least 1.0 MB"
    )
    assert [line for line in about_disk(said, disk) if status["error"] in line]
    assert status["step"] == 20 or "ddp" in plugin[0]


def test_a_run_whose_weights_do_not_fit_says_so(full, disk):
    run(full, "tracker=none", at=5, code=1)
    status = read(the_run(disk))
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 20)
    assert "no checkpoint can be written" in status["error"]
    assert f"the disk {disk}" in status["error"]
    assert "\n" not in status["error"]


def test_a_run_that_begins_on_a_full_disk_creates_nothing(full, disk):
    fill(disk)
    said = run(full, code=2)
    [line] = about_disk(said, disk)
    assert "free at least 1.0 MB" in line
    assert not list(disk.glob("outputs/*/*"))
    run(full, "-m", "seed=0,1", code=2)
    assert not list(disk.glob("outputs/*/*"))


@pytest.mark.slow
def test_a_sweep_stops_and_the_same_command_finishes_it(full, disk):
    sweep = ["-m", "seed=0,1,2", "sweep.name=full", "tracker=none"]
    said = run(full, *sweep, at=5, code=1)
    folder = disk / "outputs" / "sweeps" / "full"
    assert said.count("the sweep stops: ") == 1
    assert about_disk(said, disk)
    (disk / "filler").unlink()
    assert not (folder / "1" / "status.json").exists()
    assert not (folder / "2" / "status.json").exists()
    assert read(folder / "0")["state"] == "failed"

    run(full | {"FILLED": ""}, *sweep, at=5)
    assert [read(folder / str(number))["state"] for number in range(3)] == ["finished"] * 3
    record = read(folder, "sweep.json")
    assert record["state"] == "finished"
    assert rows_of(folder / "0") == list(range(1, 21))


class TestPatientFile:
    """Lines of a file on a full disk."""

    def test_lines_are_kept_and_written_later_none_torn(self, disk):
        file = PatientFile(disk / "lines")
        line = b"x" * 999 + b"\n"
        file.append(line)
        (disk / "filler").write_bytes(b"y" * (2**26 - 2**13))  # room for eight lines at most
        for _ in range(100):
            file.append(line)
        assert file.missing > 80
        assert file.error is not None
        (disk / "filler").unlink()
        file.append(line)
        assert (file.missing, file.error, file.size) == (0, None, 0)
        file.close()
        assert (disk / "lines").read_bytes() == line * 102

    def test_the_oldest_lines_are_dropped_where_memory_ends(self, disk):
        fill(disk)
        file = PatientFile(disk / "lines", most=1000)
        for number in range(100):
            file.append(b"%099d\n" % number)
        assert file.missing == 100
        assert file.size <= 1000
        (disk / "filler").unlink()
        file.close()
        assert file.missing == file.dropped == 90
        assert (disk / "lines").read_text().split() == [f"{n:099d}" for n in range(90, 100)]


def test_the_last_status_is_written_on_a_full_disk(disk):
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


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.slow
def test_a_record_of_wandb_that_did_not_fit_is_one_warning(disk, monkeypatch, caplog, freed):
    monkeypatch.setenv("HOME", str(disk))
    given = {"project": "p", "group": None, "tags": [], "job_type": "train", "name": "n"}
    sink = WandbSink(disk, mode="offline", timeout=120, run_id="full1", config={}, **given)
    row = {f"grad/norm/{number}": number / 7 for number in range(200)}
    sink.write({"train/step": 1, **row})
    wait_for(lambda: list(disk.glob("wandb/offline-run-*/run-full1.wandb")))
    fill(disk)
    for step in range(2, 50):
        sink.write({"train/step": step, **row})
    time.sleep(3)  # wandb writes once a second
    if freed:
        (disk / "filler").unlink()
    sink.close({"steps": 49}, 0)
    assert not recorded(disk)
    assert ["not complete, because its disk was full" in line for line in caplog.messages] == [True]


def test_a_page_that_does_not_fit_is_one_warning(disk, caplog):
    record = Record(disk)
    record.begin({"seed": 0}, "0" * 16, None)
    record.end("finished", 0, None, None)
    fill(disk)
    assert write_page(disk) is None
    [line] = caplog.messages
    assert line.startswith(f"the disk {disk} is full (0 kB free): report.html could not be written")
    (disk / "filler").unlink()
    assert write_page(disk) == disk / "report.html"
