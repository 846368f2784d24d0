"""What a :class:`runner.Trainer` makes of the arguments that it is given, or not given."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from runner.booster.criterion import Criterion
from runner.clip import ClipMode, GradientClipping, build
from runner.config.duration import Duration

log = logging.getLogger(__name__)

Algorithms = Sequence[GradientClipping | ClipMode] | GradientClipping | ClipMode


def sgd(model: nn.Module, criterion: Criterion | None) -> Optimizer:
    """Make the default optimizer, over the parameters of ``model`` and a trainable criterion."""
    trained = dict.fromkeys(model.parameters())
    if isinstance(criterion, nn.Module):
        trained |= dict.fromkeys(p for p in criterion.parameters() if p.requires_grad)
    return torch.optim.SGD(trained, lr=0.1)


def mode_of(algorithms: Algorithms) -> ClipMode:
    """Return the clipping mode of at most one algorithm; ``none`` without one."""
    listed = [algorithms] if isinstance(algorithms, GradientClipping | ClipMode) else algorithms
    if len(listed) > 1:
        raise ValueError(f"one clipping algorithm at most, not {len(listed)}")
    for algorithm in listed:
        return algorithm.mode() if isinstance(algorithm, GradientClipping) else algorithm
    return build("none")


def duration_of(given: str | Duration) -> Duration:
    """Return a duration, parsed if it is text."""
    return given if isinstance(given, Duration) else Duration.parse(given)


def warn_of_batch_norm(model: nn.Module, accumulation_steps: int) -> None:
    """Log that batch norm sees one microbatch at a time, if that makes a difference."""
    if accumulation_steps > 1 and any(isinstance(m, _BatchNorm) for m in model.modules()):
        log.warning(
            "batch norm sees one microbatch at a time: %d accumulated microbatches are not "
            "the same as one batch of their size",
            accumulation_steps,
        )


def warn_of_kept_gradients(accumulation_steps: int) -> None:
    """Log that steps in the backward pass save no memory of gradients, if there is a window."""
    if accumulation_steps > 1:
        log.warning(
            "steps in the backward pass save no memory of gradients here: all of them are kept "
            "until the last of %d accumulated microbatches",
            accumulation_steps,
        )
