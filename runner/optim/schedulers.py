"""Learning-rate schedules over a known number of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer, lr_scheduler


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """Cosine from the optimizer's rate to ``eta_min`` (Loshchilov and Hutter 2017, 1608.03983).

    Args:
        optimizer: wrapped optimizer.
        total_steps: number of optimizer steps until the end.
        eta_min: learning rate at the end.
        last_epoch: index of the last step, -1 before the first one.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, over the ``total_steps`` of this schedule.

        torch's scheduler would keep the ``T_max`` of the state, and raise the rate again after it.
        """
        total = self.T_max
        super().load_state_dict(state_dict)
        if self.T_max != total:
            self.T_max = total
            self._last_lr = self._get_closed_form_lr()
            for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
                group["lr"] = rate


class _FactorLR(lr_scheduler.LambdaLR):
    """Multiplies the optimizer's rate by a function of the step, also in a step after loading."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._last_lr = [
            rate * factor(self.last_epoch)
            for rate, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


class LinearWarmupCosineLR(_FactorLR):
    """Linear warm-up from near 0 for a share of ``total_steps``, then cosine to ``eta_min``.

    ``eta_min`` is exact for parameter groups with the initial rate of the first one, and scaled for
    others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        floor = eta_min / optimizer.param_groups[0]["lr"] if eta_min else 0.0

        def decay(done: float) -> float:
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

        factor = _after_warmup(total_steps, warmup_fraction, decay)
        super().__init__(optimizer, factor, last_epoch=last_epoch)


class LinearWarmupPolynomialLR(_FactorLR):
    """Linear warm-up from near 0, then (1 - progress) ** power to 0.

    The progress rises from 0 at the end of the warm-up to 1 at the last step. A power of 1 is a
    straight line, a power of 0 a constant rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float,
        power: float,
        last_epoch: int = -1,
    ) -> None:
        if not power >= 0:
            raise ValueError(f"power must be at least 0, not {power}")
        factor = _after_warmup(total_steps, warmup_fraction, lambda done: (1 - done) ** power)
        super().__init__(optimizer, factor, last_epoch=last_epoch)


class LinearWarmupLR(_FactorLR):
    """Linear warm-up over a number of steps, then a straight line to 0; a name of Colossal-AI's.

    Step i of the w steps of the warm-up has (i + 1) / (w + 1) of the optimizer's rate.

    Args:
        optimizer: wrapped optimizer.
        total_steps: number of steps until the end.
        warmup_steps: number of steps of the warm-up, below ``total_steps``.
        last_epoch: index of the last step, -1 before the first one.

    Raises:
        ValueError: ``warmup_steps`` is out of range.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(f"warmup_steps must lie in [0, {total_steps}), not {warmup_steps}")

        def scale(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            return max(0.0, (total_steps - step) / (total_steps - warmup_steps))

        super().__init__(optimizer, scale, last_epoch=last_epoch)


class StaircaseLR(_FactorLR):
    """Multiply the optimizer's rate by ``factor`` at the end of each of ``stairs`` equal parts.

    Exponential decay in steps: C. Szegedy et al. 2016 (1512.00567, section 8) multiply by 0.94
    every two epochs of a hundred, which is 50 stairs.
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


def _after_warmup(
    total_steps: int, warmup_fraction: float, decay: Callable[[float], float]
) -> Callable[[int], float]:
    if not 0 <= warmup_fraction < 1:
        raise ValueError(f"warmup_fraction must lie in [0, 1), not {warmup_fraction}")
    warmup = math.ceil(total_steps * warmup_fraction)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return decay(min(1.0, (step - warmup) / max(1, total_steps - warmup)))

    return factor
