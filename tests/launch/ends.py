"""Start a run as a user does, end it in some way, and look at what is left."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.process import wait_for

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner")


def only_run(home):
    (folder,) = Path(home, "runs").iterdir()
    return folder


def read(folder, name="status.json"):
    return json.loads((folder / name).read_text())


def rows_of(folder):
    """Rows that are complete, without times."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    timed = ("time/", "throughput/")
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(timed)}
        for line in lines
    ]


def faulty(fault, *at, rank=1):
    """Overrides for the fault in these steps, one in each attempt; step 8 by default."""
    model = ["model._target_=tests.faulty.Faulty", f"+model.fault={fault}"]
    return [*model, f"+model.rank={rank}", f"+model.at=[{','.join(map(str, at or [8]))}]"]


@dataclass
class Started:
    """A command that was started, the first process of a session; ``home`` has its outputs."""

    process: subprocess.Popen[bytes]
    home: Path

    @property
    def printed(self):
        return (self.home / "printed").read_text(errors="replace")[-4000:]

    @property
    def folder(self):
        return only_run(self.home / "outputs")

    @property
    def status(self):
        return read(self.folder)

    def wait_for(self, happened):
        """Wait until something happened, while the command runs."""
        wait_for(lambda: happened() or self.process.poll() is not None, shown=lambda: self.printed)
        assert happened(), self.printed

    def handles_signals(self):
        mask = Path(f"/proc/{self.process.pid}/status").read_text().partition("SigCgt:")[2]
        return bool(int(mask.split()[0], 16) & 1 << (signal.SIGUSR1 - 1))

    def wait_for_rows(self, count=1):
        files = self.home.glob
        self.wait_for(lambda: any(files("outputs/runs/*/metrics.jsonl")))
        self.wait_for(lambda: len(rows_of(self.folder)) >= count)

    def ends(self, code):
        """Wait for the end of the command, which leaves nothing behind."""
        assert self.process.wait(600) == code, self.printed
        assert "Traceback" not in self.printed, self.printed
        self.leaves_nothing()

    def processes(self):
        """Return the processes that the command started, and itself; zombies do not count."""
        mark = f"RUNNER_OUTPUTS={self.home / 'outputs'}".encode()
        ids = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if mark in (process / "environ").read_bytes().split(b"\0") and state not in "ZX":
                    ids.append(int(process.name))
        return ids

    def leaves_nothing(self):
        """Wait until no process is left of the command."""
        wait_for(lambda: not self.processes(), shown=self.processes)


def kill(pid):
    """Kill a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def started(environment, words, before=("-m", "runner"), ignored=()):
    """Start ``python <before> <words>``, which ignores some signals; kill all at the end."""
    home = Path(environment["RUNNER_OUTPUTS"]).parent
    home.mkdir(exist_ok=True)
    command = [sys.executable, *before, "device=cpu", *words]

    def signals():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    with (home / "printed").open("wb") as printed:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
            preexec_fn=signals,
        )
    run = Started(process, home)
    try:
        yield run
    finally:
        for pid in {*run.processes(), *([] if process.returncode is not None else [process.pid])}:
            kill(pid)
        process.wait()
