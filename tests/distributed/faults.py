"""Faults that clipping has had in other projects, planted one at a time into this one.

    python -m tests.distributed.faults

trains a small case under a plugin with each of them, compares it with one process as every test of
agreement does, and prints what gives the fault away. It exits with 1 if one goes unseen, or if the
comparison sees something where nothing was planted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

from runner.booster import LossScale
from tests.distributed import wrong_clipping
from tests.distributed.by_hand import NORM, Loop
from tests.distributed.cases import Case, differences, train
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

REL = 1e-9
Plant = Callable[[], Any]
"""Opens a context in which the implementation is wrong."""


@dataclass(frozen=True)
class Fault:
    """A fault, and the cases in which it must be noticed.

    Attributes:
        plant: opens a context in which the implementation has it.
        where: plugins on two ranks, each with a model and a mode that should give it away.
        hangs: ranks may wait for one another for ever.
    """

    plant: Plant
    where: Mapping[str, tuple[str, str]]
    hangs: bool = False


FAULTS: dict[str, Fault] = {
    "replicas counted twice": Fault(
        wrong_clipping.replicas_counted_twice, {"tensor": ("gpt", "L2"), "zero1": ("gpt", "L2")}
    ),
    "tied copy counted twice": Fault(
        wrong_clipping.tied_copy_counted_twice, {"1f1b": ("tied", "L2")}
    ),
    "expert group left out": Fault(wrong_clipping.peers_left_out, {"moe": ("moe", "L2")}),
    "stage group left out": Fault(wrong_clipping.peers_left_out, {"1f1b": ("gpt", "L2")}),
    "shards of peers left out": Fault(wrong_clipping.peers_left_out, {"fsdp": ("gpt", "inf")}),
    "average instead of sum": Fault(
        wrong_clipping.averaged, {"moe": ("moe", "L2"), "fsdp": ("gpt", "L3")}
    ),
    "early return without gradients": Fault(
        wrong_clipping.early_return, {"1f1b": ("first_frozen", "L2")}, hangs=True
    ),
    "norm of norms": Fault(
        wrong_clipping.norm_of_norms, {"fsdp": ("gpt", "L2"), "1f1b": ("gpt", "L2")}
    ),
    "epsilon per rank": Fault(wrong_clipping.epsilon_per_rank, {"fsdp": ("gpt", "L2")}),
    "clip before the sync": Fault(wrong_clipping.clipped_before_the_sync, {"zero1": ("gpt", "L2")}),
    "gradients instead of parameters": Fault(
        wrong_clipping.gradients_instead_of_parameters,
        {"fsdp": ("gpt", "L2"), "tensor": ("gpt", "L2")},
    ),
    "scale taken after its growth": Fault(
        wrong_clipping.scale_after_its_growth, {"zero1": ("gpt", "L2")}
    ),
    "no division by data parts": Fault(
        wrong_clipping.no_division_by_data_parts, {"zero1": ("gpt", "none")}
    ),
    "experts divided by edp": Fault(
        wrong_clipping.experts_divided_by_their_replicas, {"moe": ("moe", "none")}
    ),
    "tied gradients not added": Fault(
        wrong_clipping.tied_gradients_not_added, {"1f1b": ("tied", "none")}
    ),
    "partial sums not added": Fault(
        wrong_clipping.partial_sums_not_added, {"sequence": ("gpt", "none")}
    ),
    "inputs of split layers not added": Fault(
        wrong_clipping.split_layers_inputs_not_added, {"tensor": ("gpt", "none")}
    ),
    "cut rows not completed": Fault(
        wrong_clipping.cut_rows_not_completed, {"tensor": ("gpt", "adaptive")}
    ),
    "cut vectors not completed": Fault(
        wrong_clipping.cut_vectors_not_completed, {"fsdp": ("gpt", "adaptive")}
    ),
}
PLANTED = [(name, plugin) for name, fault in FAULTS.items() for plugin in fault.where]
ENDLESS = 15
"""Seconds after which ranks that wait for one another are given up."""

Job = tuple[str | None, str, str]
"""The name of a fault or None for none, a model and a mode."""


def jobs_under(plugin: str) -> list[Job]:
    """What is trained under ``plugin``: every case that it has with no fault, then with its own."""
    faults = [(n, *FAULTS[n].where[p]) for n, p in PLANTED if p == plugin and not FAULTS[n].hangs]
    return [*((None, *case) for case in dict.fromkeys(job[1:] for job in faults)), *faults]


def train_jobs(plugin: str, jobs: Sequence[Job], guarded: bool = False) -> list[dict[str, Any]]:
    """What a rank makes of ``jobs``, one after the other.

    Args:
        plugin: under which.
        jobs: faults and cases.
        guarded: whether the layout may account for every element before the first step, and the
            first step compare the gradients of tensor ranks.
    """
    results = []
    for name, model, mode in jobs:
        with ExitStack() as planted:
            if not guarded:
                planted.enter_context(wrong_clipping.unguarded())
            if name is not None:
                planted.enter_context(FAULTS[name].plant())
            # A scale that doubles in each step: a factor that is taken at the wrong time shows.
            scale = LossScale(scale=2.0**10, growth_interval=1)
            results.append(train(_case(model, mode), plugin, loss_scale=scale))
    return results


def _case(model: str, mode: str) -> Case:
    return Case(model, mode, steps=2)


@cache
def seen_under(plugin: str) -> dict[Job, list[str]]:
    """Return the differences from one process in each of the plugin's jobs."""
    jobs = jobs_under(plugin)
    ranks = run_ranks(train_jobs, 2, plugin, jobs)
    return {
        job: differences([rank[number] for rank in ranks], _case(*job[1:]), REL)
        for number, job in enumerate(jobs)
    }


def norm_by_hand(name: str, plugin: str, model: str) -> float:
    """The norm that a rank clips by, with a fault; no other collective comes after it.

    A rank that leaves early would answer its peers' next question with numbers meant for another.
    """
    loop = Loop(plugin, make(model))
    loop.backward(*batch_for(model))
    with FAULTS[name].plant():
        return float(loop.clip(NORM).norm)


def caught_by(name: str, plugin: str) -> str | None:
    """Return the first difference that the fault makes under ``plugin``; None if there is none.

    Raises:
        AssertionError: the ranks failed for another reason than a difference in metrics.
    """
    fault = FAULTS[name]
    job = (name, *fault.where[plugin])
    if fault.hangs:
        try:
            norms = run_ranks(norm_by_hand, 2, name, plugin, job[1], timeout=ENDLESS)
        except AssertionError as error:
            return f"a rank that waits for another: {str(error).strip().splitlines()[-1]}"
        return f"norms {norms} of one gradient" if len(set(norms)) > 1 else None
    found = seen_under(plugin)[job]
    told = next((line for line in found if " instead of " in line), found[0] if found else None)
    return None if told is None else f"{told} ({len(found)} in all)"


def seen_without_fault(plugin: str) -> list[str]:
    """Return the differences from one process without a fault."""
    return [line for job, found in seen_under(plugin).items() if job[0] is None for line in found]


def main() -> int:
    """Plant one fault after the other; 1 if one goes unseen."""
    wrong = 0
    for plugin in sorted({plugin for _, plugin in PLANTED}):
        found = seen_without_fault(plugin)
        wrong += bool(found)
        print(f"nothing planted under {plugin}: {found[0] if found else 'nothing seen'}")
    print(f"{'fault':34} | {'plugin':8} | caught by")
    for name, plugin in PLANTED:
        by = caught_by(name, plugin)
        wrong += by is None
        print(f"{name:34} | {plugin:8} | {by or 'NOTHING'}", flush=True)
    print(f"{len(PLANTED)} planted, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
