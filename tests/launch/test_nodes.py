"""Runs over several machines: two torchruns on this one take the places of two machines."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import python

SMALL = ["train.max_duration=12ba", "eval.interval=12ba", "data.batch_size=16", "tracker=none"]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def torchrun(environment, *words, nodes=2, ranks=1, timeout=150, of_node=({}, {})):
    """Start ``torchrun`` once for each machine, and return their exit codes and what they print."""
    port = free_port()
    elastic = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    elastic += ["--local-addr=127.0.0.1", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, "-m", "runner"]
    started = [
        subprocess.Popen(
            [*command, "device=cpu", *words],
            env={**environment, **of_node[node]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in range(nodes)
    ]
    try:
        printed = [one.communicate(timeout=timeout)[0] for one in started]
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.communicate()
    return [one.returncode for one in started], printed


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


@pytest.mark.sampled
@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_two_machines_are_one_machine_with_two_ranks(environment, tmp_path, plugin):
    words = [f"plugin={plugin}", *SMALL]
    one = environment | {"RUNNER_OUTPUTS": str(tmp_path / "one")}
    python("-m", "runner", "device=cpu", *words, "plugin.nproc=2", env=one)
    codes, printed = torchrun(environment, *words, "plugin.nnodes=2")
    assert codes == [0, 0], printed
    folder = only_run(environment["RUNNER_OUTPUTS"])
    assert rows(folder) == rows(only_run(tmp_path / "one"))
    assert read(folder, "summary.json")["world_size"] == 2


def test_another_number_of_machines_is_refused(environment):
    codes, printed = torchrun(environment, "plugin=ddp", "plugin.nnodes=3", *SMALL)
    assert codes == [1, 1]
    message = "plugin.nnodes=3  2 machines started ranks: give 2, or leave it out"
    assert all(message in text for text in printed), printed
    assert not Path(environment["RUNNER_OUTPUTS"]).exists()


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
