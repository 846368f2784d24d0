"""A real Slurm on this machine for one test: munged, slurmctld and a slurmd for each node.

It needs root and Debian's packages slurm-wlm and munge; a test that asks for it is skipped where
they are missing. The nodes n1 and n2 are both this machine, so that ranks find each other at
127.0.0.1. Jobs of the partition urgent pre-empt those of the default one, with a grace time. There
is no accounting database: ``sacct`` fails.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.launch.ends import kill
from tests.process import wait_for

NODES = ("n1", "n2")
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
KillWait=10
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
MailProg=/bin/true
NodeName=DEFAULT CPUs=2 RealMemory=4000
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    environment: Mapping[str, str]

    def __call__(self, *command):
        """What a command that succeeds prints, such as ``squeue``, ``sbatch`` or ``scontrol``."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def job(self, number):
        return self("scontrol", "show", "job", number)

    def preempt(self):
        """Pre-empt all jobs by one that takes both nodes for a moment."""
        self("srun", "--partition=urgent", "--exclusive", "--nodes=2", "true")

    def restart(self, number):
        """Start a job that was queued again at once; by default Slurm waits two minutes."""

        def queued():
            return all(word in self.job(number) for word in ("Restarts=1", "JobState=PENDING"))

        wait_for(queued, shown=lambda: self.job(number))
        self("scontrol", "update", f"job={number}", "StartTime=now")


@contextmanager
def running(home, environment):
    """Start a Slurm with its files in ``home``, and stop it with all its jobs at the end."""
    if os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))):
        pytest.skip("needs root, slurm-wlm and munge")
    (home / "state").mkdir(parents=True)
    conf = home / "slurm.conf"
    key = home / "munge.key"
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(3)]
        for connection in sockets:
            connection.bind(("127.0.0.1", 0))
        ports = [connection.getsockname()[1] for connection in sockets]
    conf.write_text(CONF.format(host=socket.gethostname(), home=home, ports=ports))
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    slurm = Slurm({**environment, "SLURM_CONF": str(conf)})
    munged = [f"--{name}={home}/munge.{name}" for name in ("socket", "seed")]
    munged += [f"--pid-file={home}/munged.pid", f"--log-file={home}/munge.log", "--force"]
    with ExitStack() as stops:
        for name, command in [
            ("munged", ["munged", f"--key-file={key}", *munged]),
            ("slurmctld", ["slurmctld"]),
            *((node, ["slurmd", f"-N{node}"]) for node in NODES),
        ]:
            stops.callback(_stop, home / f"{name}.pid")
            subprocess.run(command, env=slurm.environment, check=True, timeout=600)

        def idle():
            words = ["--noheader", "--Node", "--partition=test", "--format=%T"]
            return slurm("sinfo", *words).split()

        wait_for(lambda: idle() == ["idle"] * len(NODES), shown=idle)
        stops.callback(_cancel, slurm)
        yield slurm


def _cancel(slurm):
    """End all jobs, and wait for their processes: a slurmd that ends leaves them behind."""
    slurm("scancel", "--me")
    wait_for(lambda: not slurm("squeue", "--noheader"), shown=lambda: slurm("squeue"))


def _stop(pid_file):
    if pid_file.exists():
        kill(int(pid_file.read_text()))
