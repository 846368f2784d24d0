"""Learning-rate schedules over a known number of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer, lr_scheduler

from runner.config.notation import higher_is_better, plural
from runner.config.problem import ArgumentError


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

    ``warmup_steps``, if given, is the length of the warm-up in steps instead. ``eta_min`` is exact
    for parameter groups with the optimizer's own rate, and scaled for others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float = 0.0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
        warmup_steps: int | None = None,
    ) -> None:
        floor = eta_min / optimizer.defaults["lr"] if eta_min else 0.0

        warmup = _warmup(total_steps, warmup_fraction, warmup_steps)

        def decay(step: int) -> float:
            angle = math.pi * _progress(step, warmup, total_steps)
            return floor + (1 - floor) * 0.5 * (1 + math.cos(angle))

        super().__init__(optimizer, _after_warmup(warmup, decay), last_epoch=last_epoch)


class LinearWarmupPolynomialLR(_FactorLR):
    """Linear warm-up from near 0, then (1 - progress) ** power to 0.

    The progress rises from 0 at the end of the warm-up to 1 at the last step. A power of 1 is a
    straight line, a power of 0 a constant rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float = 0.0,
        power: float = 1.0,
        last_epoch: int = -1,
        warmup_steps: int | None = None,
    ) -> None:
        if not power >= 0:
            raise ArgumentError("power", f"must be at least 0, not {power}")
        warmup = _warmup(total_steps, warmup_fraction, warmup_steps)

        def decay(step: int) -> float:
            return float((1 - _progress(step, warmup, total_steps)) ** power)

        super().__init__(optimizer, _after_warmup(warmup, decay), last_epoch=last_epoch)


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
            raise ArgumentError(
                "warmup_steps", f"must lie in [0, {total_steps}), not {warmup_steps}"
            )

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
            raise ArgumentError("stairs", f"must be at least 1, not {stairs}")
        if not 0 < factor <= 1:
            raise ArgumentError("factor", f"must lie in (0, 1], not {factor}")

        def scale(step: int) -> float:
            return float(factor ** min(stairs - 1, step * stairs // total_steps))

        super().__init__(optimizer, scale, last_epoch=last_epoch)


class WarmupStableDecayLR(_FactorLR):
    """Linear warm-up, a constant rate, and a decay to 0 in the last part of the run.

    S. Hu et al. 2024 (2404.06395, section 4). A. Hägele et al. 2024 (2405.18392, section 4) find
    that ``1 - sqrt(progress)`` decays to a lower loss than a straight line.

    Args:
        optimizer: wrapped optimizer.
        total_steps: number of optimizer steps until the end.
        warmup_fraction: share of the steps in which the rate rises.
        decay_fraction: share of the steps in which the rate falls.
        shape: ``sqrt`` or ``linear``.
        last_epoch: index of the last step, -1 before the first one.
        warmup_steps: length of the warm-up in steps, instead of ``warmup_fraction``.

    Raises:
        ValueError: a share or a shape is wrong, or the parts are longer than the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_fraction: float = 0.0,
        decay_fraction: float = 0.2,
        shape: str = "sqrt",
        last_epoch: int = -1,
        warmup_steps: int | None = None,
    ) -> None:
        if not 0 <= decay_fraction <= 1:
            raise ArgumentError("decay_fraction", f"must lie in [0, 1], not {decay_fraction}")
        if shape not in ("sqrt", "linear"):
            raise ArgumentError("shape", f"must be sqrt or linear, not {shape}")
        warmup = _warmup(total_steps, warmup_fraction, warmup_steps)
        decay = math.ceil(total_steps * decay_fraction)
        if warmup + decay > total_steps:
            raise ValueError(
                f"a warm-up of {plural(warmup, 'step')} and a decay of {decay} are longer than the "
                f"run, {plural(total_steps, 'step')}"
            )
        power = 0.5 if shape == "sqrt" else 1.0

        def stable_then_decay(step: int) -> float:
            return float(1 - _progress(step, total_steps - decay, total_steps) ** power)

        factor = _after_warmup(warmup, stable_then_decay)
        super().__init__(optimizer, factor, last_epoch=last_epoch)


class PlateauLR(lr_scheduler.ReduceLROnPlateau):
    """torch's ``ReduceLROnPlateau``, which the Trainer steps after each evaluation.

    Args:
        optimizer: wrapped optimizer.
        metric: metric of evaluations to watch, such as ``eval/loss``.
        mode: ``max`` if a higher value is better; None: of an accuracy the higher.
        options: arguments of :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        metric: str = "eval/loss",
        mode: Literal["min", "max"] | None = None,
        **options: Any,
    ) -> None:
        if mode is None:
            mode = "max" if higher_is_better(metric) else "min"
        super().__init__(optimizer, mode=mode, **options)
        self.metric = metric
        self.initial_rates = [group["lr"] for group in optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what was counted, with the options of this schedule.

        The rates of this optimizer are reduced as far as the rates of the state were.
        """
        counted = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
        super().load_state_dict({name: state_dict[name] for name in counted if name in state_dict})
        saved = list(zip(state_dict["initial_rates"], state_dict["_last_lr"], strict=True))
        for number, group in enumerate(self.optimizer.param_groups):
            before, reduced = saved[min(number, len(saved) - 1)]
            initial = self.initial_rates[number]
            group["lr"] = reduced if initial == before else initial * (reduced / before)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _warmup(total_steps: int, fraction: float, steps: int | None) -> int:
    """Return the length of a warm-up in steps, which may be given as a share of the run."""
    if steps is None:
        if not 0 <= fraction < 1:
            raise ArgumentError("warmup_fraction", f"must lie in [0, 1), not {fraction}")
        return math.ceil(total_steps * fraction)
    if not 0 <= steps < total_steps:
        raise ArgumentError("warmup_steps", f"must lie in [0, {total_steps}), not {steps}")
    return steps


def _after_warmup(warmup: int, decay: Callable[[int], float]) -> Callable[[int], float]:
    """Return the factor of a step: it rises to 1 in the warm-up; then ``decay`` gives it."""

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else decay(step)

    return factor


def _progress(step: int, first: int, end: int) -> float:
    """Return which share of the steps from ``first`` to ``end`` is done, from 0 to 1."""
    return min(max((step - first) / max(1, end - first), 0.0), 1.0)
