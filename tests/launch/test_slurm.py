"""A job that Slurm pre-empts and starts again goes on where it was: a real Slurm of one node.

It needs root and Debian's packages slurm-wlm and munge; it is skipped where they are missing.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.ends import kill

pytestmark = pytest.mark.slow

DAEMONS = ("munged", "slurmctld", "slurmd")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
PartitionName=test Nodes=n1 Default=YES MaxTime=INFINITE State=UP
"""

JOB = """#!/bin/sh
#SBATCH --requeue --open-mode=append --output={home}/printed -n1 --mem=1000
srun {command}
"""


def free_ports():
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def slurm(tmp_path):
    """Environment variables for the commands of a Slurm that runs as long as the test."""
    if os.geteuid() or not all(map(shutil.which, DAEMONS)):
        pytest.skip("needs root, slurm-wlm and munge")
    conf, key = tmp_path / "slurm.conf", tmp_path / "munge.key"
    conf.write_text(CONF.format(host=socket.gethostname(), home=tmp_path, ports=free_ports()))
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (tmp_path / "state").mkdir()
    around = {"SLURM_CONF": str(conf)}
    munge = [f"--{name}={tmp_path}/munge.{name}" for name in ("socket", "seed")]
    munge += [f"--pid-file={tmp_path}/munged.pid", f"--log-file={tmp_path}/munge.log", "--force"]
    try:
        for command in (["munged", f"--key-file={key}", *munge], ["slurmctld"], ["slurmd", "-Nn1"]):
            subprocess.run(command, env=os.environ | around, check=True, timeout=30)
        yield around
    finally:
        ended = 'scancel --me; while [ -n "$(squeue --noheader)" ]; do sleep 1; done'
        subprocess.run(ended, shell=True, env=os.environ | around, timeout=60)
        for name in reversed(DAEMONS):
            if (file := tmp_path / f"{name}.pid").exists():
                kill(int(file.read_text()))


def wait_for(happened, printed, limit=200):
    until = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < until, printed.read_text() if printed.exists() else "nothing"
        time.sleep(0.2)


@pytest.mark.parametrize("plugin", [["plugin=single"], ["plugin=ddp", "plugin.nproc=2"]])
def test_a_job_that_is_pre_empted_goes_on_in_its_folder(slurm, environment, tmp_path, plugin):
    words = ["device=cpu", "tracker=none", "train.max_duration=200ba", "log.flush=5", *plugin]
    command = [sys.executable, "-m", "runner", *words]
    whole = environment | {"RUNNER_OUTPUTS": str(tmp_path / "whole")}
    subprocess.run(command, env=whole, check=True, timeout=200)
    script, printed = tmp_path / "job.sh", tmp_path / "printed"
    script.write_text(JOB.format(home=tmp_path, command=" ".join(command)))

    def ask(*command):
        done = subprocess.run(
            command,
            env=environment | slurm | environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def rows(outputs):
        found = [*outputs.glob("runs/*/metrics.jsonl")]
        lines = found[0].read_text().split("\n")[:-1] if len(found) == 1 else []
        timed = ("time/", "throughput/")
        return [
            {key: value for key, value in json.loads(line).items() if not key.startswith(timed)}
            for line in lines
        ]

    outputs = Path(environment["RUNNER_OUTPUTS"])
    job = ask("sbatch", "--parsable", str(script))
    wait_for(lambda: len(rows(outputs)) > 20, printed)
    ask("scancel", "--signal=USR1", job)
    wait_for(lambda: "Restarts=1" in ask("scontrol", "show", "job", job), printed)
    wait_for(lambda: "JobState=PENDING" in ask("scontrol", "show", "job", job), printed)
    ask("scontrol", "update", f"job={job}", "StartTime=now")  # by default two minutes later
    [status] = outputs.glob("runs/*/status.json")
    wait_for(lambda: json.loads(status.read_text())["state"] == "finished", printed)
    assert len(json.loads(status.read_text())["resumed"]) == 1
    assert rows(outputs) == rows(tmp_path / "whole")
