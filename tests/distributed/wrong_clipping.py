"""Clipping as it went wrong in other projects: contexts in which it does so here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

import runner.booster.plugin.hybrid as hybrid
import runner.clip.decision as decision_module
from runner.booster.optimizer import OptimizerWrapper
from runner.clip import Decision, Layout, Number, ParamShard, adaptive, layout, norm, norms
from runner.clip.mode import ClipMode
from runner.parallel import gradient_sync as sync
from runner.parallel import tensor
from runner.parallel.gradient_sync import nothing
from runner.parallel.replica_check import ReplicaCheck


@contextmanager
def replicas_counted_twice() -> Iterator[None]:
    """Every rank counts all that it holds."""
    with _placed(lambda shard: replace(shard, num_replicas=1)):
        yield


@contextmanager
def tied_copy_counted_twice() -> Iterator[None]:
    """Both stages count the embedding that they share."""
    with _placed(
        lambda shard: replace(shard, num_replicas=1) if shard.name == "embed.weight" else shard
    ):
        yield


def _placed(change: Callable[[ParamShard], ParamShard]) -> Any:
    place = layout.placed
    return patch.object(layout, "placed", lambda *args: change(place(*args)))


@contextmanager
def peers_left_out() -> Iterator[None]:
    """Compute the norm from the shards of this rank alone."""

    def measure(layout: Layout, norm_type: float = 2.0, *_: object) -> norms.Measured:
        powers = [norms.power_sum([gradient], norm_type) for gradient in layout.gradients()[1]]
        return norms.Measured(norms.combine([0.0, *powers], norm_type), None)

    with patch.object(decision_module, "measure", measure):
        yield


def _combining(wrong: Callable[[Sequence[Number], float], Number]) -> Any:
    """Patch the function that combines the powers of all ranks to one norm."""
    right = norms.combine

    def combine(powers: Sequence[Number], norm_type: float) -> Number:
        alone = len(powers) < 2 or math.isinf(norm_type)
        return (right if alone else wrong)(powers, norm_type)

    return patch.object(norms, "combine", combine)


@contextmanager
def averaged() -> Iterator[None]:
    """The powers of the ranks are averaged, not summed."""
    with _combining(lambda powers, p: (sum(powers) / len(powers)) ** (1 / p)):
        yield


@contextmanager
def norm_of_norms() -> Iterator[None]:
    """The norms of the ranks are added, not their powers."""
    with _combining(lambda powers, p: sum(power ** (1 / p) for power in powers)):
        yield


@contextmanager
def epsilon_per_rank() -> Iterator[None]:
    """Every rank adds its own epsilon to the norm."""
    with _combining(lambda powers, p: sum(powers) ** (1 / p) + 1e-6 * len(powers)):
        yield


@contextmanager
def early_return() -> Iterator[None]:
    """A rank without gradients does not wait for the others."""
    right = norms.measure

    def measure(layout: Layout, *options: Any) -> norms.Measured:
        return right(layout, *options) if layout.gradients()[1] else norms.Measured(0.0, None)

    with patch.object(decision_module, "measure", measure):
        yield


@contextmanager
def clipped_before_the_sync() -> Iterator[None]:
    """Gradients are averaged after each rank has clipped its own."""
    right = OptimizerWrapper.clip

    def clip(self: OptimizerWrapper, mode: ClipMode, **options: bool) -> Decision:
        sync_grads, self._sync_grads = self._sync_grads, nothing
        try:
            return right(self, mode, **options)
        finally:
            self._sync_grads = sync_grads
            sync_grads()

    with patch.object(OptimizerWrapper, "clip", clip):
        yield


@contextmanager
def gradients_instead_of_parameters() -> Iterator[None]:
    """Copies of the gradients are clipped."""
    right = norm.NormClip.apply

    def apply(self: norm.NormClip, layout: Layout, decision: Decision) -> Decision:
        gradients = layout.gradients()[1]
        kept = [gradient.clone() for gradient in gradients]
        completed = right(self, layout, decision)
        for gradient, before in zip(gradients, kept, strict=True):
            gradient.copy_(before)
        return completed

    with patch.object(norm.NormClip, "apply", apply):
        yield


@contextmanager
def scale_after_its_growth() -> Iterator[None]:
    """The loss scale moves before the gradients are divided by it."""
    right = OptimizerWrapper.unscale

    def unscale(self: OptimizerWrapper) -> None:
        if self.loss_scale is not None and not self._unscaled:
            self.loss_scale.update(True)
        right(self)

    with patch.object(OptimizerWrapper, "unscale", unscale):
        yield


def _divided_by(divisor: Callable[[sync.Replicas], int]) -> Any:
    """Patch the divisor of sums over replicas."""
    right = sync.Replicas

    def replicas(*args: Any) -> sync.Replicas:
        made = right(*args)
        return replace(made, divisor=divisor(made))

    return patch.object(sync, "Replicas", replicas)


@contextmanager
def no_division_by_data_parts() -> Iterator[None]:
    """Gradients are summed over data parts that each divided by all items already times parts."""
    with _divided_by(lambda replicas: 1):
        yield


@contextmanager
def experts_divided_by_their_replicas() -> Iterator[None]:
    """Gradients of experts are divided by the ranks that hold them, not by the data parts."""
    with _divided_by(lambda replicas: replicas.group.size()):
        yield


@contextmanager
def tied_gradients_not_added() -> Iterator[None]:
    """Each stage keeps its own gradient of a weight that is one."""
    with patch.object(hybrid, "sum_copies", lambda tied: None):
        yield


@contextmanager
def partial_sums_not_added() -> Iterator[None]:
    """Each rank takes its part of a norm's gradient, along the sequence, for the whole."""

    def resolve(parameters: Sequence[DTensor]) -> None:
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
                parameter.grad = DTensor.from_local(
                    gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False
                )

    with patch.object(hybrid, "sum_partial", resolve):
        yield


@contextmanager
def split_layers_inputs_not_added() -> Iterator[None]:
    """What flows back through a split layer is this rank's part of it."""

    with patch.object(tensor, "copy_to", lambda hidden, group: hidden):
        yield


@contextmanager
def cut_rows_not_completed() -> Iterator[None]:
    """Adaptive clipping takes the part of a row that lies here for the whole row."""
    with patch.object(adaptive, "_complete_rows", lambda shards, lengths: None):
        yield


@contextmanager
def cut_vectors_not_completed() -> Iterator[None]:
    """Adaptive clipping takes the part of a vector that lies here for the whole vector."""
    right = adaptive._complete_vectors

    def complete(layout: Layout, shards: Any, lengths: list[Any], eps: float) -> Tensor:
        return right(layout, shards, list(lengths), eps)

    with patch.object(adaptive, "_complete_vectors", complete):
        yield


@contextmanager
def unguarded() -> Iterator[None]:
    """Switch off the layout's check and the comparison of tensor ranks' gradients.

    Only metrics can then show a fault.
    """
    right = layout.account

    def account(shards: Any, group: Any, whole: Mapping[str, int]) -> Any:
        # No sum is unlike NaN by more than the bound.
        return right(shards, group, dict.fromkeys(whole, math.nan))  # type: ignore[arg-type]

    with (
        patch.object(layout, "account", account),
        patch.object(ReplicaCheck, "__call__", lambda check: None),
    ):
        yield
