"""Faults that clipping has had in other projects, planted one at a time into this one.

    python -m tests.distributed.faults

trains a small case under a plugin with each of them, compares it with one process as every test of
agreement does, and prints what gives the fault away. It exits with 1 if one goes unseen, or if the
comparison sees something where nothing was planted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import DTensor, Replicate

import runner.booster.plugin.hybrid as hybrid
import runner.clip.decision as decision_module
from runner.booster import LossScale
from runner.booster.optimizer import OptimizerWrapper
from runner.clip import ParamShard, adaptive, layout, norm, norms
from runner.clip.shard import LayoutError
from runner.parallel import gradient_sync as sync
from runner.parallel import tensor
from runner.parallel.replica_check import ReplicaCheck
from runner.parallel.tensor_styles import PlanError
from tests.distributed.cases import Case, differences, train
from tests.ranks import run_ranks

Plant = Callable[[], Any]
"""Opens a context in which the implementation is wrong."""


def placed(change: Callable[[ParamShard], ParamShard]) -> Plant:
    """Change what a layout says of its shards."""
    place = layout.placed
    return lambda: patch.object(layout, "placed", lambda *args: change(place(*args)))


def combined(wrong: Callable[[Any, float], Any]) -> Plant:
    """Change how the powers of all ranks become one norm."""
    right = norms.combine

    def combine(powers: Any, norm_type: float) -> Any:
        alone = len(powers) < 2 or math.isinf(norm_type)
        return (right if alone else wrong)(powers, norm_type)

    return lambda: patch.object(norms, "combine", combine)


def divided_by(divisor: Callable[[sync.Replicas], int]) -> Plant:
    """Change the divisor of sums over replicas."""
    right = sync.Replicas

    def replicas(*args: Any) -> sync.Replicas:
        made = right(*args)
        return replace(made, divisor=divisor(made))

    return lambda: patch.object(sync, "Replicas", replicas)


def replaced(where: Any, name: str, by: Callable[[Any], Any]) -> Plant:
    """Replace a function by what ``by`` makes of it."""
    wrong = by(getattr(where, name))
    return lambda: patch.object(where, name, wrong)


def of_this_rank_alone(_: Any) -> Any:
    def measure(layout: Any, norm_type: float = 2.0, *_: object) -> norms.Measured:
        powers = [norms.power_sum([gradient], norm_type) for gradient in layout.gradients()[1]]
        return norms.Measured(norms.combine([0.0, *powers], norm_type), None)

    return measure


def before_the_sync(right: Any) -> Any:
    def clip(self: OptimizerWrapper, mode: Any, **options: bool) -> Any:
        sync_grads, self._sync_grads = self._sync_grads, sync.nothing
        try:
            return right(self, mode, **options)
        finally:
            self._sync_grads = sync_grads
            sync_grads()

    return clip


def copies_of_gradients(right: Any) -> Any:
    def apply(self: Any, layout: Any, decision: Any) -> Any:
        gradients = layout.gradients()[1]
        kept = [gradient.clone() for gradient in gradients]
        completed = right(self, layout, decision)
        for gradient, before in zip(gradients, kept, strict=True):
            gradient.copy_(before)
        return completed

    return apply


def after_its_growth(right: Any) -> Any:
    def unscale(self: OptimizerWrapper) -> None:
        if self.loss_scale is not None and not self._unscaled:
            self.loss_scale.update(True)
        right(self)

    return unscale


def taken_for_whole(_: Any) -> Any:
    def resolve(parameters: Any) -> None:
        for parameter in parameters:
            own = parameter.grad
            if isinstance(own, DTensor) and own.placements[0].is_partial():
                placement = [Replicate()]
                parameter.grad = DTensor.from_local(
                    own.to_local(), own.device_mesh, placement, run_check=False
                )

    return resolve


def once(shard: ParamShard) -> ParamShard:
    return replace(shard, num_replicas=1)


# A fault, how it is planted, and the plugins on two ranks under which a model and a mode show it.
FAULTS: dict[str, tuple[Plant, dict[str, tuple[str, str]]]] = {
    "replicas counted twice": (
        placed(once),
        {"tensor": ("gpt", "L2"), "zero1": ("gpt", "L2")},
    ),
    "tied copy counted twice": (
        placed(lambda shard: once(shard) if shard.name == "embed.weight" else shard),
        {"1f1b": ("tied", "L2")},
    ),
    "shards of peers left out": (
        replaced(decision_module, "measure", of_this_rank_alone),
        {"moe": ("moe", "L2"), "1f1b": ("gpt", "L2"), "fsdp": ("gpt", "inf")},
    ),
    "average instead of sum": (
        combined(lambda powers, p: (sum(powers) / len(powers)) ** (1 / p)),
        {"moe": ("moe", "L2"), "fsdp": ("gpt", "L3")},
    ),
    "norm of norms": (
        combined(lambda powers, p: sum(power ** (1 / p) for power in powers)),
        {"fsdp": ("gpt", "L2"), "1f1b": ("gpt", "L2")},
    ),
    "epsilon per rank": (
        combined(lambda powers, p: sum(powers) ** (1 / p) + 1e-6 * len(powers)),
        {"fsdp": ("gpt", "L2")},
    ),
    "clip before the sync": (
        replaced(OptimizerWrapper, "clip", before_the_sync),
        {"zero1": ("gpt", "L2")},
    ),
    "gradients instead of parameters": (
        replaced(norm.NormClip, "apply", copies_of_gradients),
        {"fsdp": ("gpt", "L2"), "tensor": ("gpt", "L2")},
    ),
    "scale taken after its growth": (
        replaced(OptimizerWrapper, "unscale", after_its_growth),
        {"zero1": ("gpt", "L2")},
    ),
    "no division by data parts": (divided_by(lambda replicas: 1), {"zero1": ("gpt", "none")}),
    "experts divided by edp": (
        divided_by(lambda replicas: replicas.group.size()),
        {"moe": ("moe", "none")},
    ),
    "tied gradients not added": (
        replaced(hybrid, "sum_copies", lambda _: lambda tied: None),
        {"1f1b": ("tied", "none")},
    ),
    "partial sums not added": (
        replaced(hybrid, "sum_partial", taken_for_whole),
        {"sequence": ("gpt", "none")},
    ),
    "inputs of split layers not added": (
        replaced(tensor, "copy_to", lambda _: lambda hidden, group: hidden),
        {"tensor": ("gpt", "none")},
    ),
    "cut rows not completed": (
        replaced(adaptive, "_complete_rows", lambda _: lambda shards, lengths: None),
        {"tensor": ("gpt", "adaptive")},
    ),
    "cut vectors not completed": (
        replaced(
            adaptive,
            "_complete_vectors",
            lambda right: lambda layout, shards, lengths, eps: right(
                layout, shards, [*lengths], eps
            ),
        ),
        {"fsdp": ("gpt", "adaptive")},
    ),
}
PLUGINS = sorted({plugin for _, where in FAULTS.values() for plugin in where})


def unguarded() -> ExitStack:
    """Switch off the layout's check and the comparison of tensor ranks' gradients."""
    right, stack = layout.account, ExitStack()
    # No sum is unlike NaN by more than the bound.
    nothing = lambda shards, group, whole: right(shards, group, dict.fromkeys(whole, math.nan))  # noqa: E731
    stack.enter_context(patch.object(layout, "account", nothing))
    stack.enter_context(patch.object(ReplicaCheck, "__call__", lambda check: None))
    return stack


def jobs_under(plugin: str) -> list[tuple[str | None, Case]]:
    """Every case of a plugin with no fault, then with its own."""
    where = {name: of[plugin] for name, (_, of) in FAULTS.items() if plugin in of}
    jobs = [(None, each) for each in dict.fromkeys(where.values())] + [*where.items()]
    return [(name, Case(*each, steps=2)) for name, each in jobs]


def train_jobs(plugin: str) -> list[tuple[dict[str, Any], str | None]]:
    """Of each job, what a rank makes of it without checks, and the error that a check raises."""
    results = []
    for name, case in jobs_under(plugin):
        plant = FAULTS[name][0] if name else ExitStack

        def run(case: Case = case) -> dict[str, Any]:
            # A scale that doubles in each step: a factor that is taken at the wrong time shows.
            return train(case, plugin, loss_scale=LossScale(2.0**10, growth_interval=1))

        with unguarded(), plant():
            result = run()
        error = None
        with plant():
            try:
                run()
            except (LayoutError, PlanError) as raised:
                error = f"{type(raised).__name__}: {raised}"
        results.append((result, error))
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
