"""Notice a job of Slurm that is queued again and again, but takes no step in its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.config.environment import slurm_job, was_requeued
from runner.run_folder.status import SLURM_JOB

BEGAN = "began_at"
"""Entry of a status: the step at which this start of the run began."""

STALLS = "stalls"
"""Entry of a status: number of starts in a row, before this one, that took no step."""

MOST = 2
"""Starts in a row without a step after which a job ends instead of starting once more."""


def counted(former: Mapping[str, Any], step: int) -> dict[str, int]:
    """Return the entries of the status of a run that starts at ``step``; none outside of Slurm.

    Only starts by Slurm itself count: a user who repeats the command has changed something.

    Args:
        former: status that the last start of this run left; empty for the first one.
        step: step of the checkpoint that the run continues from, or 0.
    """
    if slurm_job() is None:
        return {}
    again = was_requeued() and former.get(SLURM_JOB) == slurm_job() and former.get(BEGAN) == step
    before = former.get(STALLS)
    stalls = (before if isinstance(before, int) else 0) + 1 if again else 0
    return {BEGAN: step, STALLS: stalls}


def refusal(counts: Mapping[str, int]) -> str | None:
    """Return why a job must not start once more; None if it may."""
    if counts.get(STALLS, 0) < MOST:
        return None
    return (
        f"job {slurm_job()} was queued again, but its last {MOST} starts took no step after step "
        f"{counts[BEGAN]}: its time does not suffice for a step and a checkpoint. Give it more "
        "(#SBATCH --time, hydra.launcher.timeout_min), or signal the end of its time later "
        "(#SBATCH --signal, hydra.launcher.signal_delay_s); the same command then continues it"
    )
