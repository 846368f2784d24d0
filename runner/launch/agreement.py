"""Refuse ranks of torchrun or srun that were started with different commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from runner.config.environment import in_slurm_step, started_rank
from runner.config.identity import digest
from runner.config.problem import MISSING, Problem, RequestError, leaves, shown
from runner.launch.failure import Failure
from runner.launch.process_group import LATER, abandon, launch_from_torch, leave

FREE = ("tracker", "report")  # sections that the first rank alone uses
MOST = 10  # differing keys that a message names


def require_same_request(request: Mapping[str, Any], timeout: float) -> None:
    """Join the ranks that were started with this one, and compare their requests.

    If they differ, every rank raises the same RequestError. Nothing has been created by then.
    """
    started = started_rank()
    if started is None or started.world_size == 1:
        return
    compared = {key: value for key, value in request.items() if key not in FREE}
    try:
        launch_from_torch(verbose=False, timeout=timeout + LATER)
        other = _first_that_differs(digest(compared), started.world_size)
        if other is None:
            return
        first_request = _sent_by(0, compared)
        other_request = _sent_by(other, compared)
        leave()
    except RuntimeError as error:
        abandon()
        reason = str(error).strip().partition("\n")[0]
        why = f"rank {started.rank} did not meet the other ranks of {started.world_size}: {reason}"
        raise Failure(f"{why}{_how_to_separate()}", started.rank) from error
    problems = [*_differences(first_request, other_request, other)]
    raise RequestError(problems[:MOST])


def _first_that_differs(own_hash: str, world_size: int) -> int | None:
    hashes = [""] * world_size
    dist.all_gather_object(hashes, own_hash)
    for rank, other_hash in enumerate(hashes):
        if other_hash != hashes[0]:
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
