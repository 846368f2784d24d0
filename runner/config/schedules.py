"""Pipeline schedules: the facts about each one that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Schedule(NamedTuple):
    """One pipeline schedule."""

    stages_per_rank: int
    fills_every_stage: bool
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(1, fills_every_stage=False),
    "1f1b": Schedule(1, fills_every_stage=True),
    "interleaved_1f1b": Schedule(2, fills_every_stage=True),
    "zero_bubble": Schedule(2, fills_every_stage=False, splits_backward=True),
}


def stages_text(schedule: str, pp_size: int, section: str = "") -> str:
    """Return how many stages ``pp_size`` ranks hold, to begin a message."""
    stages = pp_size * SCHEDULES[schedule].stages_per_rank
    return f"{section}pp_size={pp_size} with {section}schedule={schedule} is {stages} stages"


def refused_microbatches(
    schedule: str, pp_size: int, microbatches: int, section: str = ""
) -> str | None:
    """Return why ``microbatches`` do not fill the pipeline; None if they do."""
    stages = pp_size * SCHEDULES[schedule].stages_per_rank
    given = stages_text(schedule, pp_size, section)
    if SCHEDULES[schedule].fills_every_stage and microbatches < stages:
        way = f"give {stages} or more, or {section}schedule=gpipe"
        return f"{given}, each of which needs a microbatch: {way}"
    rounds = microbatches // pp_size
    if schedule == "interleaved_1f1b" and microbatches % rounds:
        fitting = f"{pp_size * rounds} or {pp_size * (rounds + 1)}"
        return f"{given}, in which {microbatches} microbatches make no equal rounds: give {fitting}"
    return None
