"""Faults that clipping has had in other projects, planted one at a time into this one.

    python -m tests.distributed.faults

trains a small case under a plugin with each of them, compares it with one process as every test of
agreement does, and prints what gives the fault away. It exits with 1 if one goes unseen, or if the
comparison sees something where nothing was planted.
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import DTensor, Replicate

import runner.booster.plugin.hybrid as hybrid
import runner.clip.decision as decision_module
from runner.booster import LossScale
from runner.booster.optimizer import OptimizerWrapper
from runner.clip import adaptive, layout, norms
from runner.clip.shard import LayoutError
from runner.parallel import gradient_sync as sync
from runner.parallel import tensor
from runner.parallel.replica_check import ReplicaCheck
from runner.parallel.tensor_styles import PlanError
from tests.distributed.cases import Case, differences, train
from tests.ranks import run_ranks

account, placed, combine = layout.account, layout.placed, norms.combine
clip, unscale, replicas = OptimizerWrapper.clip, OptimizerWrapper.unscale, sync.Replicas
complete_vectors = adaptive._complete_vectors


def measure_own(layout: Any, norm_type: float = 2.0, *_: object) -> norms.Measured:
    powers = [norms.power_sum([gradient], norm_type) for gradient in layout.gradients()[1]]
    return norms.Measured(norms.combine([0.0, *powers], norm_type), None)


def norm_of_norms(powers: Any, p: float) -> Any:
    alone = len(powers) < 2 or math.isinf(p)
    return combine(powers, p) if alone else sum(power ** (1 / p) for power in powers)


def clip_before_the_sync(self: OptimizerWrapper, mode: Any, **options: bool) -> Any:
    sync_grads, self._sync_grads = self._sync_grads, sync.nothing
    try:
        return clip(self, mode, **options)
    finally:
        self._sync_grads = sync_grads
        sync_grads()


def unscale_by_the_next_scale(self: OptimizerWrapper) -> None:
    if self.loss_scale is not None and not self._unscaled:
        self.loss_scale.update(True)
    unscale(self)


def replicas_divided_by_themselves(*args: Any) -> sync.Replicas:
    made = replicas(*args)
    return replace(made, divisor=made.group.size())


def take_parts_for_sums(parameters: Any) -> None:
    for parameter in parameters:
        part = parameter.grad
        if isinstance(part, DTensor) and part.placements[0].is_partial():
            whole, mesh = part.to_local(), part.device_mesh
            parameter.grad = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


# A fault, what it replaces by what, and the plugins on two ranks where a model and a mode show it.
FAULTS: dict[str, tuple[Any, str, Any, dict[str, tuple[str, str]]]] = {
    "replicas counted twice": (
        *(layout, "placed", lambda *args: replace(placed(*args), num_replicas=1)),
        {"tensor": ("gpt", "L2"), "zero1": ("gpt", "L2"), "1f1b": ("tied", "L2")},
    ),
    "shards of peers left out": (
        *(decision_module, "measure", measure_own),
        {"moe": ("moe", "L2"), "1f1b": ("gpt", "L2"), "fsdp": ("gpt", "inf")},
    ),
    "norm of norms": (
        *(norms, "combine", norm_of_norms),
        {"fsdp": ("gpt", "L2"), "1f1b": ("gpt", "L2")},
    ),
    "clip before the sync": (
        OptimizerWrapper,
        "clip",
        clip_before_the_sync,
        {"zero1": ("gpt", "L2")},
    ),
    "scale taken after its growth": (
        *(OptimizerWrapper, "unscale", unscale_by_the_next_scale),
        {"zero1": ("gpt", "L2")},
    ),
    "no division by data parts": (
        *(sync, "Replicas", lambda *args: replace(replicas(*args), divisor=1)),
        {"zero1": ("gpt", "none")},
    ),
    "experts divided by edp": (
        *(sync, "Replicas", replicas_divided_by_themselves),
        {"moe": ("moe", "none")},
    ),
    "tied gradients not added": (
        hybrid,
        "sum_copies",
        lambda tied: None,
        {"1f1b": ("tied", "none")},
    ),
    "partial sums not added": (
        *(hybrid, "sum_partial", take_parts_for_sums),
        {"sequence": ("gpt", "none")},
    ),
    "inputs of split layers not added": (
        *(tensor, "copy_to", lambda hidden, group: hidden),
        {"tensor": ("gpt", "none")},
    ),
    "cut rows not completed": (
        *(adaptive, "_complete_rows", lambda shards, lengths: None),
        {"tensor": ("gpt", "adaptive")},
    ),
    "cut vectors not completed": (
        *(adaptive, "_complete_vectors"),
        lambda layout, shards, lengths, eps: complete_vectors(layout, shards, [*lengths], eps),
        {"fsdp": ("gpt", "adaptive")},
    ),
}
PLUGINS = sorted({plugin for *_, where in FAULTS.values() for plugin in where})


def unguarded() -> ExitStack:
    """Switch off the layout's check and the comparison of tensor ranks' gradients."""
    stack = ExitStack()

    def nothing(shards: Any, group: Any, whole: Any) -> Any:
        # No sum is unlike NaN by more than the bound.
        return account(shards, group, dict.fromkeys(whole, math.nan))

    stack.enter_context(patch.object(layout, "account", nothing))
    stack.enter_context(patch.object(ReplicaCheck, "__call__", lambda check: None))
    return stack


def jobs_under(plugin: str) -> list[tuple[str | None, Case]]:
    """Every case of a plugin with no fault, then with its own."""
    where = {name: of[plugin] for name, (*_, of) in FAULTS.items() if plugin in of}
    jobs = [(None, each) for each in dict.fromkeys(where.values())] + [*where.items()]
    return [(name, Case(*each, steps=2)) for name, each in jobs]


def train_jobs(plugin: str) -> list[tuple[dict[str, Any], str | None]]:
    """Of each job, what a rank makes of it without checks, and the error that a check raises."""
    results = []
    for name, case in jobs_under(plugin):
        with patch.object(*FAULTS[name][:3]) if name else nullcontext():
            # A scale that doubles in each step: a factor that is taken at the wrong time shows.
            with unguarded():
                result = train(case, plugin, loss_scale=LossScale(2.0**10, growth_interval=1))
            try:
                train(case, plugin)
                results.append((result, None))
            except (LayoutError, PlanError) as raised:
                results.append((result, f"{type(raised).__name__}: {raised}"))
    return results


def seen_under(plugin: str) -> list[tuple[str | None, list[str], str | None]]:
    """Of each job, the fault, differences from one process, and the error of a check."""
    ranks = run_ranks(train_jobs, 2, plugin)
    return [
        (name, differences([rank[number][0] for rank in ranks], case, 1e-9), ranks[0][number][1])
        for number, (name, case) in enumerate(jobs_under(plugin))
    ]


def main() -> int:
    """Plant one fault after the other; 1 if one goes unseen."""
    wrong = 0
    for plugin in PLUGINS:
        for name, found, error in seen_under(plugin):
            wrong += bool(found) == (name is None)
            by = found[0] if found else "NOTHING"
            print(f"{name or 'nothing planted':34} | {plugin:8} | {by} | {error}", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
