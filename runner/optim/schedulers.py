"""Learning-rate schedules over a known number of optimizer steps."""

from __future__ import annotations

import math

from torch.optim import Optimizer, lr_scheduler


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """Cosine from the optimizer's rate to ``eta_min`` (Loshchilov and Hutter 2017, 1608.03983).

    Args:
        optimizer: whose rate moves.
        total_steps: calls of ``step`` until the end.
        eta_min: rate at the end.
        last_epoch: steps taken already, less one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class LinearWarmupCosineLR(lr_scheduler.LambdaLR):
    """Linear from near 0 over the warm-up, then cosine to ``eta_min``.

    Args:
        optimizer: whose rate moves.
        total_steps: calls of ``step`` until the end.
        warmup_fraction: share of ``total_steps`` that is warm-up, in [0, 1).
        eta_min: lowest rate, for parameter groups of the optimizer's first rate.
        last_epoch: steps taken already, less one.

    Raises:
        ValueError: ``warmup_fraction`` is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_fraction < 1:
            raise ValueError(f"warmup_fraction must lie in [0, 1), not {warmup_fraction}")
        warmup = math.ceil(total_steps * warmup_fraction)
        floor = eta_min / optimizer.param_groups[0]["lr"] if eta_min else 0.0

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

        super().__init__(optimizer, factor, last_epoch=last_epoch)


class LinearWarmupPolynomialLR(lr_scheduler.LambdaLR):
    """Linear from near 0 over the warm-up, then a power of what is left, to 0.

    After the warm-up the rate is the optimizer's times (1 - done) ** power, where done goes from 0
    to 1: a straight line for a power of 1, a constant rate for 0.

    Args:
        optimizer: whose rate moves.
        total_steps: calls of ``step`` until the end.
        warmup_fraction: share of ``total_steps`` that is warm-up, in [0, 1).
        power: of the share of steps that is left; at least 0.
        last_epoch: steps taken already, less one.

    Raises:
        ValueError: ``warmup_fraction`` or ``power`` is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float,
        power: float,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_fraction < 1:
            raise ValueError(f"warmup_fraction must lie in [0, 1), not {warmup_fraction}")
        if not power >= 0:
            raise ValueError(f"power must be at least 0, not {power}")
        warmup = math.ceil(total_steps * warmup_fraction)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
            return float((1 - done) ** power)

        super().__init__(optimizer, factor, last_epoch=last_epoch)


class StaircaseLR(lr_scheduler.LambdaLR):
    """The optimizer's rate, multiplied by ``factor`` at the end of each of ``stairs`` equal parts.

    Exponential decay in steps: C. Szegedy et al. 2016 (1512.00567, section 8) multiply by 0.94
    every two epochs of a hundred, which is 50 stairs.

    Args:
        optimizer: whose rate moves.
        total_steps: calls of ``step`` until the end.
        stairs: parts of the run in which the rate stays the same; at least 1.
        factor: of the rate from one part to the next, in (0, 1].
        last_epoch: steps taken already, less one.

    Raises:
        ValueError: ``stairs`` or ``factor`` is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        stairs: int,
        factor: float,
        last_epoch: int = -1,
    ) -> None:
        if stairs < 1:
            raise ValueError(f"stairs must be at least 1, not {stairs}")
        if not 0 < factor <= 1:
            raise ValueError(f"factor must lie in (0, 1], not {factor}")

        def scale(step: int) -> float:
            return float(factor ** min(stairs - 1, step * stairs // total_steps))

        super().__init__(optimizer, scale, last_epoch=last_epoch)
