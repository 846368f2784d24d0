"""``sweep.json``, what a sweep was asked for and the state of each of its runs; taken folders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from runner.config.identity import masked_words
from runner.run_folder import files
from runner.run_folder.status import is_unfinished
from runner.run_folder.strict_json import write_object


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Entry:
    """One run of a sweep."""

    number: Annotated[int, Field(ge=0)]
    folder: Annotated[str, Field(pattern=r"^\d+$")]  # it is moved away if the run starts again
    overrides: list[str]
    words: list[str]
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
        """The overrides in which it differs from the other runs, on one line."""
        return " ".join(self.overrides)

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
        """Return the record in the folder of a sweep."""
        path = folder / files.SWEEP
        try:
            return _READER.validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise ValueError(f"{path} is no record of a sweep: {why}") from None

    @classmethod
    def find(cls, folder: Path) -> SweepRecord | None:
        """Return the record in the folder of a sweep, or None if there is none."""
        return cls.read(folder) if (folder / files.SWEEP).exists() else None

    def write(self, folder: Path) -> None:
        """Replace the record in the folder of a sweep; secrets in overrides are masked."""
        content = asdict(self)
        for part in (content, *content["entries"]):
            for key in {"words", "overrides"} & part.keys():
                part[key] = masked_words(part[key])
        content["runs"] = content.pop("entries")
        write_object(folder / files.SWEEP, content)

    @property
    def gives_up(self) -> bool:
        """Whether more runs failed than ``sweep.max_failures`` allows."""
        return self.max_failures is not None and self.failures > self.max_failures

    def of(self, number: int) -> Entry:
        """Return the run with a number."""
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
    known = [
        (one.objective, one)
        for one in entries
        if one.state == "finished" and one.objective is not None and math.isfinite(one.objective)
    ]
    choose = max if maximizes else min
    return choose(known, key=lambda pair: pair[0])[1] if known else None


def earlier_record(
    folder: Path, request: str | None = None, jobs: Sequence[str] = ()
) -> str | None:
    """Return why a run or a sweep must not be written to ``folder``, or None if it may be."""
    if request is not None:
        return _other_sweep(folder, request, jobs)
    if is_unfinished(folder):
        return None  # the run continues it, or is refused where its configuration is known
    if (folder / files.LOCK).exists() and not (folder / files.STATUS).exists():
        return None  # a run that was killed before its record began
    for name in (files.STATUS, files.MULTIRUN, files.HYDRA):
        if (folder / name).exists():
            return f"holds the record of an earlier run ({name}); choose another name or remove it"
    return None


def _other_sweep(folder: Path, request: str, jobs: Sequence[str]) -> str | None:
    try:
        record = SweepRecord.find(folder)
    except (OSError, ValueError) as error:
        return f"{error}; choose another sweep.name or remove {folder}"
    if record is None:
        # A sweep that ended before it wrote anything leaves its lock files.
        if not folder.is_dir() or all(one.suffix == ".lock" for one in folder.iterdir()):
            return None
        return f"{folder} holds something that is no sweep; choose another sweep.name or remove it"
    known = Counter(entry.config_hash for entry in record.entries)
    extended = 0 < record.total == len(record.entries) and known <= Counter(jobs)
    if record.request == request or extended:
        return None
    return f"{folder} holds another request ({' '.join(record.words)}); choose another sweep.name"
