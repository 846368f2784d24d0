"""The records of a run and of a sweep: who may write to a folder, and how what is in it stands."""

from __future__ import annotations

import errno
import logging
import math
import os
import platform
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from runner.config.environment import slurm_job
from runner.config.identity import config_hash
from runner.config.masking import hidden_in, masked_words
from runner.config.notation import with_short_numbers
from runner.config.problem import Problem, RequestError
from runner.config.reading import DamagedFile, content_of
from runner.run_folder import files, keys
from runner.run_folder.strict_json import (
    encode,
    not_written,
    number,
    read_object,
    write_object,
    write_text,
)

log = logging.getLogger(__name__)

RESUMED = "resumed"  # entry of the status of a run that was continued: the steps at which it was
PROGRESS_SECONDS = 1.0  # shortest time between two writes of the step to `status.json`
RELEASED = 8.0  # to wait for a lock: children of a process that is gone may finish a step first


@contextmanager
def claimed(folder: Path, key: str = "hydra.run.dir") -> Iterator[None]:
    """Make a folder, and hold it against other processes."""
    from filelock import FileLock, Timeout  # it imports asyncio, which readers do not need

    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if shutil.disk_usage(existing).free < 2**16:  # bytes that the record of a run needs
        raise not_written(OSError(errno.ENOSPC, ""), folder, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / files.LOCK, timeout=RELEASED):
            yield
    except Timeout:
        message = "another process is using this folder: wait for its end, or choose another folder"
        raise RequestError([Problem(key, str(folder), message)]) from None


class Record:
    """Keep ``config.yaml``, ``status.json`` and ``summary.json`` of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status: dict[str, Any] = {}
        self._written = -math.inf  # when the status was written last
        self._seconds_before = 0.0  # of earlier processes that trained this run
        self._begun = 0.0

    def begin(self, config: dict[str, Any], run_id: str | None, **resumed: Any) -> dict[str, Any]:
        """Write the configuration and the state ``running``, and return the status."""
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        write_text(self._folder / files.CONFIG, text)
        self._status = {
            "state": "running",
            "exit_code": None,
            "error": None,
            "rank": None,
            "config_hash": config_hash(config),
            "wandb_run_id": run_id,
            "step": 0,
            "started": now(),
            "ended": None,
            keys.WALL_SECONDS: 0.0,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._status |= job_ids() | resumed
        self._seconds_before = self._status[keys.WALL_SECONDS]
        self._begun = time.monotonic()
        self._write_status()
        return self._status

    def note(self, entries: Mapping[str, Any]) -> None:
        """Write further entries to the status."""
        self._status |= entries
        self._write_status()

    def write(self, row: Mapping[str, Any]) -> None:
        """Take the step of a row; the file is written at most once a second."""
        self._status["step"] = int(row[keys.TRAIN_STEP])
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            with suppress(OSError):
                self._write_status()

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Do nothing: :meth:`end` was called before."""

    def summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``; the status too says why a training ended early."""
        reason = summary.get(keys.ENDED_EARLY)
        if reason:
            self._status[keys.ENDED_EARLY] = reason
        write_object(self._folder / files.SUMMARY, summary)

    def end(self, state: str, exit_code: int = 0, error: str | None = None, **place: Any) -> None:
        """Write how the run ended, and at which ``rank``; a full disk has the old space."""
        self._status |= {"state": state, "exit_code": exit_code, "error": error, "ended": now()}
        self._status |= {key: value for key, value in place.items() if value is not None}
        try:
            self._write_status()
        except OSError as failure:
            log.error("%s", failure.args[-1])
            self._status["error"] = (error or "").strip().rpartition("\n")[2][:1000]
            with suppress(OSError), (self._folder / files.STATUS).open("r+") as file:
                file.write(encode(hidden_in(self._status)))
                file.truncate()

    def _write_status(self) -> None:
        self._written = time.monotonic()
        seconds = self._seconds_before + self._written - self._begun
        self._status[keys.WALL_SECONDS] = round(seconds, 3)
        write_object(self._folder / files.STATUS, self._status)


def now() -> str:
    """Return the time in UTC, as records write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def job_ids(slurm: bool = True, elastic: bool = True) -> dict[str, str]:
    """Return the jobs that this process belongs to, as a status has them."""
    jobs: dict[str, str | None] = {}
    if slurm:
        jobs["slurm_job_id"] = slurm_job()
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name:
        # The process of torchrun, which starts this one again after a failure
        agent = f"{socket.gethostname()}-{os.getppid()}"
        jobs["torchelastic_agent"] = agent
        if elastic:
            jobs["torchelastic_run_id"] = agent if name == "none" else name
    return {key: job for key, job in jobs.items() if job}


def state_of(status: Mapping[str, Any]) -> str:
    """Return the recorded state of a run, ``unknown``, or ``killed`` if its process is gone."""
    state = str(status.get("state") or "unknown")
    pid = status.get("pid")
    is_local = status.get("host") in (None, socket.gethostname())
    if state != "running" or not is_local or not isinstance(pid, int) or pid < 1:
        return state
    return state if _is_running(pid) else "killed"


def _is_running(pid: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()  # after the command's name, which may hold parentheses
    return fields[:1] not in (["Z"], ["X"])


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds the record of a run that did not come to its end."""
    state = read_object(folder / files.STATUS).get("state")
    if state is None:
        return any((folder / files.CHECKPOINTS).glob("step_*"))
    if state == "finished":
        return not read_object(folder / files.SUMMARY)
    return state in ("running", "failed", "interrupted")


def objective_of(summary: Mapping[str, Any], key: str) -> float | None:
    """Return a metric of a run's summary."""
    for part in (summary.get("best"), summary.get("final"), summary):
        value = number(part.get(key)) if isinstance(part, Mapping) else None
        if value is not None:
            return value
    return None


def provenance() -> dict[str, str]:
    """Return ``versions`` and, in a git checkout, ``git``."""
    packages = ("clip-runner", "torch", "torchvision", "hydra-core", "wandb")
    versions = [f"{name} {version(name)}" for name in packages]
    facts = {"versions": ", ".join([f"python {platform.python_version()}", *versions])}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        facts["git"] = process.stdout.strip()
    return facts


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Entry:
    """One run of a sweep."""

    number: Annotated[int, Field(ge=0)]
    folder: Annotated[str, Field(pattern=r"^\d+$")]  # it is moved away if the run starts again
    overrides: list[str]  # that set it apart from the other runs
    words: list[str]  # all of its overrides
    config_hash: str
    state: str = "waiting"
    exit_code: int | None = None
    error: str | None = None
    objective: float | None = None
    clip_ratio: float | None = None
    seconds: float | None = None
    job: str | None = None
    pid: int | None = None

    @property
    def label(self) -> str:
        """The overrides that set the run apart, in short."""
        return with_short_numbers(" ".join(masked_words(self.overrides)))

    @property
    def ended(self) -> bool:
        """Whether the run neither waits nor runs."""
        return self.state not in ("waiting", "running")


@with_config(ConfigDict(extra="forbid"))
@dataclass
class SweepRecord:
    """The content of ``sweep.json``."""

    name: str
    words: list[str]
    request: str
    objective: str
    maximizes: bool
    max_failures: int | None
    keys: list[str]
    total: int
    state: str = "running"
    started: str = ""
    ended: str | None = None
    failures: int = 0
    entries: Annotated[list[Entry], Field(alias="runs")] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """Return the record in the folder of a sweep. A ValueError says that it is none."""
        path = folder / files.SWEEP
        try:
            return _READER.validate_json(content_of(path))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path} is no record of a sweep: {key}: {first['msg']}") from None

    @classmethod
    def find(cls, folder: Path) -> SweepRecord | None:
        """Return the record in a folder; None if there is none."""
        return cls.read(folder) if (folder / files.SWEEP).exists() else None

    def write(self, folder: Path) -> None:
        """Replace the record in the folder of a sweep; secrets in overrides are masked."""
        content = asdict(self)
        content["runs"] = content.pop("entries")
        for part in (content, *content["runs"]):
            for key in ("words", "overrides"):
                if key in part:
                    part[key] = masked_words(part[key])
        write_object(folder / files.SWEEP, content)

    @property
    def gives_up(self) -> bool:
        """Whether more runs have failed than the user allows."""
        return self.max_failures is not None and self.failures > self.max_failures

    def of(self, number: int) -> Entry:
        """Return the run of this number."""
        return {entry.number: entry for entry in self.entries}[number]


_READER = TypeAdapter(SweepRecord)


@contextmanager
def changed(folder: Path) -> Iterator[SweepRecord]:
    """Yield the record of a sweep to change it; it is written when the block ends."""
    from filelock import FileLock  # it imports asyncio, which readers of a sweep do not need

    with FileLock(folder / f".{files.SWEEP}.lock"):
        record = SweepRecord.read(folder)
        yield record
        record.write(folder)


def best(entries: Iterable[Entry], maximizes: bool) -> Entry | None:
    """Return the finished run with the best finite objective; None if no run has one."""
    scored: list[tuple[float, Entry]] = []
    for entry in entries:
        score = number(entry.objective)
        if entry.state == "finished" and score is not None and math.isfinite(score):
            scored.append((score, entry))
    if not scored:
        return None
    choose = max if maximizes else min
    return choose(scored, key=lambda pair: pair[0])[1]


def earlier_run(folder: Path) -> str | None:
    """Return why a run must not be written to ``folder``, or None if it may be."""
    names = [files.STATUS, files.MULTIRUN]
    if not (folder / files.LOCK).exists():  # a run that was killed before its record leaves it
        names.append(files.HYDRA)
    existing = [name for name in names if (folder / name).exists()]
    if not existing or is_unfinished(folder):  # this is continued, or refused later
        return None
    return (
        f"holds the record of an earlier run ({existing[0]}); choose another or remove it, or "
        "go on for longer by resume=RUN train.max_duration=..."
    )


def earlier_sweep(folder: Path, identity: str, hashes: Sequence[str]) -> str | None:
    """Return why a sweep must not be written to ``folder``, or None if it may be.

    It may continue a sweep of the same ``identity``, or add runs to one: its ``hashes`` then hold
    all of the earlier runs.
    """
    advice = "; choose another sweep.name"
    try:
        record = SweepRecord.find(folder)
    except (OSError, ValueError, DamagedFile) as error:
        return f"{error}{advice} or remove {folder}"
    if record is None:
        # A sweep that ended before it wrote anything leaves its lock.
        if not folder.is_dir() or all(path.suffix == ".lock" for path in folder.iterdir()):
            return None
        return f"{folder} holds something that is no sweep{advice} or remove it"
    earlier = Counter(entry.config_hash for entry in record.entries)
    is_complete = 0 < record.total == len(record.entries)
    if record.request == identity or (is_complete and earlier <= Counter(hashes)):
        return None
    return f"{folder} holds another request ({' '.join(record.words)}){advice}"
