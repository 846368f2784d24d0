"""Let all ranks of torchrun or srun refuse a request that one of them cannot run as it is.

Each rank reads its own command. A rank that finds a problem, and ranks whose commands differ, would
leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from runner.config.environment import StartedRank, in_slurm_step, started_rank
from runner.config.identity import digest
from runner.config.notation import ranks_as_text
from runner.config.problem import (
    MISSING,
    NOTHING,
    Problem,
    RefusedOnAllRanks,
    RequestError,
    leaves,
    shown,
)
from runner.launch.failure import Failure
from runner.launch.process_group import LATER, abandon, launch_from_torch, leave

FREE = ("tracker", "report")  # sections that the first rank alone uses
MOST = 10  # differing keys that a message names
PATIENCE = 120.0  # seconds in which the others learn of a refusal; launch.timeout may be wrong too


class Answer(NamedTuple):
    """What a rank tells the others about its request."""

    hash: str = ""
    problems: tuple[Problem, ...] = ()  # why the rank refuses its request


def require_same_request(request: Mapping[str, Any], timeout: float) -> None:
    """Join the ranks that were started with this one, and compare their requests.

    If they differ, or a rank refuses its own, every rank raises the same RefusedOnAllRanks. Nothing
    has been created by then.
    """
    started = started_rank()
    if started is None or started.world_size == 1:
        return
    compared = {key: value for key, value in request.items() if key not in FREE}
    try:
        answers = _answers(Answer(digest(compared)), started, timeout)
        problems = _refusals(answers)
        if not problems:
            rank = _first_that_differs(answers)
            if rank is None:
                return
            first_request = _sent_by(0, compared)
            other_request = _sent_by(rank, compared)
            problems = [*_differences(first_request, other_request, rank)]
        leave()
    except RuntimeError as error:
        raise _lonely(started, error) from error
    raise RefusedOnAllRanks(problems[:MOST])


def refused_on_all_ranks(error: RequestError) -> RequestError:
    """Tell the other ranks that this one refuses its request; return the error of all of them.

    Return the error of this rank alone if the others do not come.
    """
    started = started_rank()
    if started is None or started.world_size == 1 or isinstance(error, RefusedOnAllRanks):
        return error
    if dist.is_initialized() and started.rank > 0:  # the first rank has no such problem to tell
        return error
    answer = Answer(problems=tuple(_as_text(problem) for problem in error.problems))
    try:
        if dist.is_initialized():  # the others wait for what the first rank tells them to do
            refused = RefusedOnAllRanks(answer.problems)
            dist.broadcast_object_list([refused], src=0)
        else:
            refused = RefusedOnAllRanks(_refusals(_answers(answer, started, PATIENCE)))
        leave()
    except RuntimeError:
        abandon()
        return error
    return refused


def _answers(answer: Answer, started: StartedRank, timeout: float) -> list[Answer]:
    """Join the other ranks, and return the answer of each."""
    launch_from_torch(verbose=False, timeout=timeout + LATER)
    answers = [answer] * started.world_size
    dist.all_gather_object(answers, answer)
    return answers


def _as_text(problem: Problem) -> Problem:
    """Return a problem that can be sent, whatever its value is; secrets are masked."""
    return replace(problem, key=problem.word, value=NOTHING)


def _refusals(answers: Sequence[Answer]) -> list[Problem]:
    """Return the problems of the first rank that has some, and name the ranks if not all have."""
    refusing = [rank for rank, answer in enumerate(answers) if answer.problems]
    if not refusing:
        return []
    problems = answers[refusing[0]].problems
    same = [rank for rank in refusing if answers[rank].problems == problems]
    if len(same) == len(answers):
        return [*problems]
    place = f" (on {ranks_as_text(same)} of {len(answers)})"
    return [replace(problem, message=f"{problem.message}{place}") for problem in problems]


def _lonely(started: StartedRank, error: RuntimeError) -> Failure:
    abandon()
    reason = str(error).strip().partition("\n")[0]
    why = f"rank {started.rank} did not meet the other ranks of {started.world_size}: {reason}"
    return Failure(f"{why}{_how_to_separate()}", started.rank)


def _first_that_differs(answers: Sequence[Answer]) -> int | None:
    for rank, answer in enumerate(answers):
        if answer.hash != answers[0].hash:
            return rank
    return None


def _sent_by(rank: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
    sent: list[Any] = [request]
    dist.broadcast_object_list(sent, src=rank)
    return dict(sent[0])


def _differences(
    first: Mapping[str, Any], other: Mapping[str, Any], rank: int
) -> Iterator[Problem]:
    first_values = dict(leaves("", first))
    other_values = dict(leaves("", other))
    for key in {**first_values, **other_values}:
        first_value = first_values.get(key, MISSING)
        other_value = other_values.get(key, MISSING)
        if first_value == other_value:
            continue
        told = "not given" if other_value == MISSING else shown(other_value)
        text = f"on rank 0, and {told} on rank {rank}: start every rank by the same command"
        yield Problem(key, first_value, f"{text}{_how_to_separate()}")


def _how_to_separate() -> str:
    if not in_slurm_step():
        return ""
    return "; separate runs: srun env -u SLURM_PROCID python -m runner"
