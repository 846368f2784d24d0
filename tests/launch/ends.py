"""Start a run as a user does, end it in some way, and look at what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.run_folder.strict_json import read_object
from tests.process import wait_for

PRIVATE = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"']
"""A command whose /dev/shm is the folder that follows."""


@dataclass
class Started:
    """A command that was started.

    Attributes:
        process: its process, the first of a session of its own.
        home: folder of everything that it writes but temporary files: outputs, shared memory.
        temporary: folder of its temporary files.
    """

    process: subprocess.Popen[bytes]
    home: Path
    temporary: Path

    @property
    def printed(self) -> str:
        """The end of what it printed so far, on both streams."""
        return (self.home / "printed").read_text(errors="replace")[-4000:]

    @property
    def folder(self) -> Path:
        """The folder of its only run."""
        (folder,) = (self.home / "outputs" / "runs").iterdir()
        return folder

    @property
    def status(self) -> dict[str, object]:
        """The status of its only run."""
        return read_object(self.folder / "status.json")

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until something happened, while the command runs."""

        def seen() -> bool:
            ended = self.process.poll() is not None
            now = happened()
            assert now or not ended, self.printed
            return now

        wait_for(seen, shown=lambda: self.printed)

    def wait_for_handlers(self) -> None:
        """Wait until the command handles signals, which is the first thing that it does."""

        def caught() -> bool:
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) & 1 << (signal.SIGUSR1 - 1))
            return False

        self.wait_for(caught)

    def wait_for_rows(self, at_least: int = 1) -> None:
        """Wait until the run has written so many rows."""

        def written() -> bool:
            files = list(self.home.glob("outputs/**/metrics.jsonl"))
            return bool(files) and files[-1].read_bytes().count(b"\n") >= at_least

        self.wait_for(written)

    def processes(self) -> list[int]:
        """Return the processes that the command started, and itself; zombies do not count."""
        mark = f"RUNNER_OUTPUTS={self.home / 'outputs'}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        found.append(int(process.name))
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Return the processes of local ranks, by rank: children of the fork server."""

        def forked(pid: int) -> bool:
            return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()

        def parent(pid: int) -> int:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

        server, *_ = (
            pid for pid in self.processes() if parent(pid) == self.process.pid and forked(pid)
        )
        return sorted(pid for pid in self.processes() if parent(pid) == server)

    def left(self, files: bool = True) -> list[str]:
        """Return what the command leaves behind: processes, and files unless ``files`` is false.

        What ends of itself is waited for.
        """
        with suppress(AssertionError):
            wait_for(lambda: not self._left(files))
        return self._left(files)

    def _left(self, files: bool) -> list[str]:
        orphans = [f"process {pid}: {_command(pid)}" for pid in self.processes()]
        kept = [*(self.home / "shm").iterdir(), *self.temporary.iterdir()] if files else []
        # torch keeps a cache there on purpose.
        return orphans + [str(file) for file in kept if "torchinductor" not in file.name]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:200]
    except OSError:
        return "it has just ended"


def kill(pid: int) -> None:
    """Kill a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def started(
    environment: Mapping[str, str],
    words: Sequence[str],
    before: Sequence[str] = ("-m", "runner"),
    ignored: Sequence[int] = (),
) -> Iterator[Started]:
    """Start a command with folders of its own, on the CPU; its processes are killed at the end.

    Args:
        environment: environment variables, with the folder for outputs.
        words: overrides.
        before: arguments of Python before the overrides.
        ignored: signals that it finds ignored, as ``nohup`` has it.
    """
    home = Path(environment["RUNNER_OUTPUTS"]).parent
    (home / "shm").mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="ends-"))  # short enough for the names of sockets
    command = [sys.executable, *before, "device=cpu", *words]
    probe = [*PRIVATE, str(home / "shm"), "true"]
    if shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0:
        command = [*PRIVATE, str(home / "shm"), *command]

    def signals() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    with (home / "printed").open("wb") as printed:
        process = subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
            preexec_fn=signals,
        )
    run = Started(process, home, temporary)
    try:
        yield run
    finally:
        for pid in {*run.processes(), *([] if process.returncode is not None else [process.pid])}:
            kill(pid)
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)
