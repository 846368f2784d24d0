"""Divide the cores and GPUs of this machine among runs of a sweep that run at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.compose.jobs import Job
from runner.config.cores import CORES, cores

GPUS = "RUNNER_GPUS"
"""Environment variable with the GPUs of each run at once: ``0,1;2,3``. A run takes one group."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Share:
    """What each of several runs at once may use.

    Attributes:
        at_once: number of runs at once.
        cores: cores of each run.
        gpus: names of the GPUs of each run; empty on a CPU.
        ranks: ranks of the largest run.
    """

    at_once: int
    cores: int
    gpus: tuple[tuple[str, ...], ...] = ()
    ranks: int = 1

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that tell the processes of the runs."""
        groups = ";".join(",".join(group) for group in self.gpus)
        return {CORES: str(self.cores), **({GPUS: groups} if groups else {})}

    def note(self, asked: int) -> str:
        """Return why fewer runs than ``asked`` start at once; empty if as many do."""
        if asked <= self.at_once:
            return ""
        of = f"{sum(map(len, self.gpus))} GPUs" if self.gpus else f"{cores()} cores"
        each = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.at_once} instead of {asked} runs at once: a run has {each}, of {of} here"


def divided(jobs: Sequence[Job], most: int) -> Share:
    """Return the share of each run, such that neither cores nor GPUs are used twice.

    A run with more ranks than there are cores runs alone.

    Args:
        jobs: the runs.
        most: most runs at once; -1 for as many as fit.
    """
    from runner.train import build

    ranks = max(build.ranks_of(job.config) for job in jobs)
    all_cores = cores()
    fitting = max(1, all_cores // ranks)
    gpus = _gpus() if any(build.device_of(job.config.device).type == "cuda" for job in jobs) else ()
    if gpus:
        fitting = min(fitting, max(1, len(gpus) // ranks))
    at_once = min(fitting, len(jobs), most if most > 0 else fitting)
    each = len(gpus) // at_once
    groups = tuple(gpus[number * each : (number + 1) * each] for number in range(at_once))
    return Share(at_once, max(1, all_cores // at_once), groups if gpus else (), ranks)


@contextmanager
def handed_out(share: Share) -> Iterator[None]:
    """Tell processes that are started in this block their share."""
    before = {name: os.environ.get(name) for name in share.environment}
    os.environ |= share.environment
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def take(sweep: Path) -> None:
    """Use no more than the share of this process, which runs one run after the other.

    It is called before torch is asked for GPUs.

    Args:
        sweep: folder of the sweep, whose processes agree there who has which GPUs.
    """
    if groups := os.environ.pop(GPUS, ""):
        os.environ[_VISIBLE] = _free_group(sweep, groups.split(";"))
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), cores()))


_held: list[Any] = []
"""Locks of this process, which are released at its end."""


def _free_group(sweep: Path, groups: Sequence[str]) -> str:
    """Return a group of GPUs that no other process of the sweep has."""
    from filelock import FileLock, Timeout

    for number, group in enumerate(groups):
        lock = FileLock(sweep / f".gpus-{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        _held.append(lock)
        return group
    raise RuntimeError(f"more processes than groups of GPUs: {groups}")


def _gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that torch sees."""
    import torch

    names = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    found = torch.cuda.device_count()
    return tuple(names[:found] if len(names) >= found else map(str, range(found)))
