"""Divide the cores of this machine among runs of a sweep that run at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from runner.compose.jobs import Job
from runner.config.cores import CORES, cores


@dataclass(frozen=True)
class Share:
    """What each of several runs at once may use."""

    at_once: int
    cores: int
    why: str

    def note(self, asked: int) -> str:
        """Return why fewer runs than ``asked`` start at once; empty if as many do."""
        return "" if asked <= self.at_once else f"{self.at_once} instead of {asked} {self.why}"


def divided(jobs: Sequence[Job], most: int) -> Share:
    """Return the share of each run, such that no core is used twice."""
    from runner.train import build

    ranks, all_cores = max(build.ranks_of(job.config) for job in jobs), cores()
    fitting = max(1, all_cores // ranks)
    each = "1 rank" if ranks == 1 else f"{ranks} ranks"
    why = f"runs at once: a run has {each}, of {all_cores} cores here"
    if any(build.device_of(job.config.device).type == "cuda" for job in jobs):
        fitting, why = 1, "runs at once: runs on GPUs of one machine follow one another"
    at_once = min(fitting, len(jobs), most if most > 0 else fitting)
    return Share(at_once, max(1, all_cores // at_once), why)


@contextmanager
def handed_out(share: Share) -> Iterator[None]:
    """Tell processes that are started in this block their share."""
    before = os.environ.get(CORES)
    os.environ[CORES] = str(share.cores)
    try:
        yield
    finally:
        del os.environ[CORES]
        if before is not None:
            os.environ[CORES] = before


def take() -> None:
    """Use no more cores than the share of this process, which runs one run after the other."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), cores()))
