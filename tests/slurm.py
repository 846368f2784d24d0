"""A real Slurm on this machine for one test: munged, slurmctld and a slurmd for each node.

It needs root and Debian's packages slurm-wlm and munge; a test that asks for it is skipped where
they are missing. The nodes n1, n2 ... are names: all of them are this machine, so that ranks of
several nodes find each other at 127.0.0.1. There is no accounting database: ``sacct`` fails.

    @pytest.fixture
    def slurm(tmp_path, environment):
        with running(tmp_path / "slurm", environment) as slurm:
            yield slurm
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.ends import kill
from tests.process import wait_for

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
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
MailProg=/bin/true
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

NODE = """
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={memory}
"""


@dataclass
class Slurm:
    """A Slurm that runs.

    Attributes:
        home: folder of its files.
        nodes: names of its nodes.
        environment: variables with which commands, ours among them, find it.
    """

    home: Path
    nodes: tuple[str, ...]
    environment: Mapping[str, str]

    def __call__(self, *command: str) -> str:
        """What a command that succeeds prints, such as ``squeue``, ``sbatch`` or ``scontrol``."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> str:
        """What ``scontrol`` says of a job, or of a task of an array (``3_0``)."""
        return self("scontrol", "show", "job", number)

    def waiting(self) -> list[str]:
        """Jobs that run or wait, one line each: number, name, state, reason."""
        return self("squeue", "--noheader", "--array", "--format=%i %j %T %r").splitlines()

    def restart(self, number: str, limit: float = 120) -> None:
        """Start a job that was queued again at once; by default Slurm waits two minutes."""
        wait_for(lambda: "JobState=PENDING" in self.job(number), limit, lambda: self.job(number))
        self("scontrol", "update", f"job={number}", "StartTime=now")


@contextmanager
def running(
    home: Path,
    environment: Mapping[str, str],
    nodes: tuple[str, ...] = ("n1", "n2"),
    cpus: int = 2,
    memory: int = 4000,
) -> Iterator[Slurm]:
    """Start a Slurm, and stop it with all its jobs when the block ends.

    Args:
        home: folder for its files, which is made; its path must not be longer than that of a
            socket may be (about 90 characters).
        environment: variables for its jobs.
        nodes: names of its nodes.
        cpus: processors of each node; more than the machine has is allowed.
        memory: memory of each node, in MB.
    """
    if os.geteuid() or not all(map(shutil.which, DAEMONS)):
        pytest.skip("needs root, slurm-wlm and munge")
    (home / "state").mkdir(parents=True)
    host, ports = socket.gethostname(), _free_ports(1 + len(nodes))
    lines = [
        NODE.format(name=name, host=host, port=port, cpus=cpus, memory=memory).strip()
        for name, port in zip(nodes, ports[1:], strict=True)
    ]
    conf, key = home / "slurm.conf", home / "munge.key"
    *before, partition = CONF.format(host=host, home=home, ports=ports).strip().splitlines()
    conf.write_text("\n".join([*before, *lines, partition, ""]))
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    slurm = Slurm(home, nodes, {**environment, "SLURM_CONF": str(conf)})
    munged = [f"--{name}={home}/munge.{name}" for name in ("socket", "seed")]
    munged += [f"--pid-file={home}/munged.pid", f"--log-file={home}/munge.log", "--force"]
    with ExitStack() as stops:
        for name, command in [
            ("munged", ["munged", f"--key-file={key}", *munged]),
            ("slurmctld", ["slurmctld"]),
            *((node, ["slurmd", f"-N{node}"]) for node in nodes),
        ]:
            stops.callback(_stop, home / f"{name}.pid")
            subprocess.run(command, env=slurm.environment, check=True, timeout=120)
        idle = lambda: slurm("sinfo", "--noheader", "--Node", "--format=%T").split()  # noqa: E731
        wait_for(lambda: idle() == ["idle"] * len(nodes), 60, idle)
        stops.callback(_cancel, slurm)
        yield slurm


def _cancel(slurm: Slurm) -> None:
    """End all jobs, and wait for their processes: a slurmd that ends leaves them behind."""
    slurm("scancel", "--me")
    try:
        wait_for(lambda: not slurm.waiting(), 30)
    except AssertionError:
        slurm("scancel", "--me", "--signal=KILL", "--full")
        wait_for(lambda: not slurm.waiting(), 60)


def _stop(pid_file: Path) -> None:
    if pid_file.exists():
        kill(int(pid_file.read_text()))


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
