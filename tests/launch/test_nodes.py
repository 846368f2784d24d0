"""Runs over several machines: two torchruns on this one take the places of two machines."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.ends import kill
from tests.process import python, wait_for

SMALL = ["train.max_duration=12ba", "eval.interval=12ba", "data.batch_size=16", "tracker=none"]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(environment, *words, nodes=2, ranks=1, flags=(), before=()):
    """Start ``torchrun`` once for each machine; they are called n1, n2 ..."""
    port = free_port()
    elastic = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", *flags]
    elastic += ["--local-addr=127.0.0.1", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, "-m", "runner"]
    return [
        subprocess.Popen(
            [*(before if node else ()), *command, "device=cpu", *words],
            env={**environment, "SLURMD_NODENAME": f"n{node + 1}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in range(nodes)
    ]


def ended(started, timeout=300):
    """Exit codes of what was started, and what it printed."""
    try:
        printed = [one.communicate(timeout=timeout)[0] for one in started]
    finally:
        for one in started:
            for pid in (*ranks_of(one), one.pid):
                kill(pid)
            one.communicate()
    return [one.returncode for one in started], printed


def torchrun(environment, *words, **options):
    """Run ``torchrun`` once for each machine, and return their exit codes and what they print."""
    return ended(start(environment, *words, **options))


def ranks_of(launcher):
    """Processes of the ranks that a torchrun has started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    parents = (line.split() for line in listed.splitlines())
    return [int(pid) for pid, parent in parents if parent == str(launcher.pid)]


def only_run(outputs):
    (folder,) = (Path(outputs) / "runs").iterdir()
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text())


def rows(folder):
    """Rows without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("time/", "throughput/")
    return [
        {key: value for key, value in line.items() if not key.startswith(timed)} for line in lines
    ]


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.product(every=2)
def test_two_machines_are_one_machine_with_two_ranks(environment, tmp_path, plugin):
    words = [f"plugin={plugin}", *SMALL]
    one = environment | {"RUNNER_OUTPUTS": str(tmp_path / "one")}
    python("-m", "runner", "device=cpu", *words, "plugin.nproc=2", env=one)
    codes, printed = torchrun(environment, *words, "plugin.nnodes=2")
    assert codes == [0, 0], printed
    folder = only_run(environment["RUNNER_OUTPUTS"])
    assert rows(folder) == rows(only_run(tmp_path / "one"))
    assert read(folder, "summary.json")["world_size"] == 2


@pytest.mark.slow
def test_another_number_of_machines_is_refused(environment):
    codes, printed = torchrun(environment, "plugin=ddp", "plugin.nnodes=3", *SMALL)
    assert codes == [1, 1]
    message = "plugin.nnodes=3  2 machines started ranks: give 2, or leave it out"
    assert all(message in text for text in printed), printed
    assert not Path(environment["RUNNER_OUTPUTS"]).exists()


@pytest.mark.slow
def test_several_machines_need_a_launcher(environment):
    words = ["plugin=ddp", "plugin.nnodes=2", "plugin.nproc=2", *SMALL]
    for command in (["run"], ["verify"]):
        done = python("-m", "runner", *command, *words, env=environment, code=2)
        way = "srun --nodes=2 --ntasks-per-node=1, or by torchrun --nnodes=2"
        assert "plugin.nnodes=2" in done.stderr
        assert way in done.stderr
    planned = python("-m", "runner", "plan", *words, env=environment)
    assert planned.stdout.endswith("on 2 machines of 2 ranks\n")
    assert not Path(environment["RUNNER_OUTPUTS"]).exists()


LONG = ["plugin=ddp", *SMALL, "train.max_duration=100000ba", "log.flush=1"]


def wait_for_rows(environment, started):
    def written():
        assert all(one.poll() is None for one in started)
        files = [*Path(environment["RUNNER_OUTPUTS"]).glob("runs/*/metrics.jsonl")]
        return files and files[0].read_bytes().count(b"\n") >= 5

    wait_for(written)


# Which agent of torchrun notices first depends on how busy the machine is.
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machine_is_named_also_if_it_is_the_first(environment, lost):
    started = start(environment, *LONG, "launch.timeout=20")
    try:
        wait_for_rows(environment, started)
        rank_0 = read(only_run(environment["RUNNER_OUTPUTS"]), "status.json")["pid"]
        first = next(one for one in started if rank_0 in ranks_of(one))
        gone = first if lost == 0 else next(one for one in started if one is not first)
        name = f"n{started.index(gone) + 1}"
        for pid in (*ranks_of(gone), gone.pid):
            kill(pid)
    finally:
        codes, printed = ended(started)
    assert 0 not in codes, printed
    status = read(only_run(environment["RUNNER_OUTPUTS"]), "status.json")
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, lost), printed
    assert status["node"] == name
    assert f"rank {lost} on {name} hangs or was killed" in status["error"]
    assert status["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[8], [8, 8, 8]])
def test_a_run_that_torchrun_starts_again_goes_on_in_its_folder(environment, tmp_path, steps):
    model = ["model._target_=tests.launch.failing.Failing", "+model.rank=1"]
    saving = ["checkpoint.interval=5ba", "checkpoint.asynchronous=false", "log.flush=1"]
    words = ["plugin=ddp", *SMALL, *saving, *model]
    fault = ["+model.fault=raise", f"+model.steps={steps}".replace(" ", "")]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    codes, printed = torchrun(environment | own_store, *words, *fault, flags=["--max-restarts=3"])
    folder = only_run(environment["RUNNER_OUTPUTS"])
    status = read(folder, "status.json")
    if len(steps) > 1:
        assert 0 not in codes
        why = "not started again: this error came twice, and both times after step 7"
        assert (status["state"], status["rank"]) == ("failed", 1)
        assert status["error"].startswith(why), printed
        assert (Path(environment["RUNNER_OUTPUTS"]) / "struck").read_text() == "xx"
        return
    assert codes == [0, 0], printed
    assert [(one["rank"], one["step"]) for one in status["restarts"]] == [(1, 5)]
    one = environment | {"RUNNER_OUTPUTS": str(tmp_path / "one")}
    python("-m", "runner", "device=cpu", *words, "plugin.nproc=2", env=one)
    assert rows(folder) == rows(only_run(tmp_path / "one"))


@pytest.mark.slow
def test_a_folder_that_a_machine_does_not_see_is_refused(environment, tmp_path):
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
    hidden.append(environment["RUNNER_OUTPUTS"])
    Path(environment["RUNNER_OUTPUTS"]).mkdir()
    if not shutil.which("unshare") or subprocess.run([*hidden, "true"]).returncode:
        pytest.skip("needs a mount of its own")
    codes, printed = torchrun(environment, *LONG, before=hidden)
    assert 0 not in codes
    status = read(only_run(environment["RUNNER_OUTPUTS"]), "status.json")
    assert status["state"] == "failed"
    assert "1 machine of this run (n2) cannot see its folder" in status["error"], printed
