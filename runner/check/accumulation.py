"""Compare the gradient of a window of microbatches with the gradient of the sum of its items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.check import window_faults
from runner.check.clipping import headline
from runner.check.parts import inner_model, parts_of
from runner.check.ranks import Ranks
from runner.check.window import Gradient, SumOfLosses, Window
from runner.clip.boosted import is_boosted
from runner.gradients.shard import local

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class AccumulationError(RuntimeError):
    """The accumulation that was checked is wrong; the message is the report."""


def check_accumulation(
    step: Callable[[list[Any]], Any],
    batches: Sequence[Any],
    *,
    model: nn.Module,
    loss: SumOfLosses,
    **options: Any,
) -> AccumulationCheck:
    """Run one window of a loop, and check its gradient; on every rank.

    ``step(batches)`` runs the forward and backward passes of all microbatches as the loop does, and
    may step the optimizer: the gradient is then read just before the step, so clip after the check
    or leave it out. In a loop that cannot be called, feed an :class:`AccumulationCheck` instead.

    Example::

        def loss(model, batch):
            inputs, targets = batch
            return cross_entropy(model(inputs), targets, reduction="sum"), len(targets)

        check = runner.check_accumulation(step, batches, model=model, loss=loss)
        print(check.report())  # on rank 0
        check.strict()  # raises AccumulationError on every rank

    Args:
        step: the code under test; it gets the list of ``batches``.
        batches: microbatches of one window on this rank.
        model: what ``step`` trains.
        loss: returns the sum of item losses, and the number of items.
        options: ``optimizer``, ``scheduler``, ``steps`` and ``timeout`` of the check.

    Returns:
        The :class:`AccumulationCheck`, to be reported. It says what is raised.
    """
    check = AccumulationCheck(model, loss, **options)
    with check:
        for batch in batches:
            check.batch(batch)
        step(list(batches))
    return check


class AccumulationCheck:
    """A context manager around the microbatches of one window, which it is fed.

    Example::

        with AccumulationCheck(model, loss) as check:
            for batch in window:
                check.batch(batch)
                train_one_microbatch(batch)
        print(check.report())

    The reference is the gradient of Σ item losses ÷ Σ items over all microbatches and data-parallel
    ranks, from one more pass over the same batches with the same random numbers. The check keeps
    the batches, and takes memory for two copies of this rank's gradients. Weights, gradients,
    buffers and random states are as they were after the window. Entering, leaving and reporting
    are collectives of all ranks.

    Args:
        model: what is trained: plain, DistributedDataParallel, or ``fully_shard``.
        loss: returns the sum of item losses, a 0-dim tensor with a graph, and the number of items.
        optimizer: its steps are counted; None: the steps of every optimizer.
        scheduler: its steps are counted.
        steps: microbatches of a full window, to name a division by it in a short one.
        timeout: seconds to wait for other ranks.

    Attributes:
        error: relative error of the gradient, ‖G − reference‖ ÷ ‖reference‖.
        sent: microbatches after which gradients were sent to other ranks; None if not known.
        faults: sentences that name what is wrong.

    Raises:
        TypeError: the model is no module, or is wrapped by FSDP 1.
        ValueError: the model was boosted, or a window without items.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: SumOfLosses,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        steps: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        if isinstance(model, nn.Module) and is_boosted(model):
            raise ValueError("this model was boosted: `python -m runner verify` checks it")
        inner = inner_model(model)
        parts, _ = parts_of(inner, None)
        trained = [part for part in parts if part.parameter.requires_grad]
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.steps = steps
        self.error = math.nan
        self.sent: int | None = None
        self.faults: list[str] = []
        self._ranks = Ranks(timeout)
        self._window = Window(inner, loss, trained, self._ranks)
        self._drawn: list[Tensor] = []  # random state before each forward pass of the model
        self._before: Gradient = []
        self._gradient: Gradient | None = None  # None until it is read
        self._optimizer_steps = 0
        self._scheduler_start = 0
        self._scheduler_steps = 0
        self._removable: list[Any] = []
        self._done = False

    def batch(self, batch: Any) -> None:
        """Feed the microbatch that is trained on next."""
        self._window.batches.append(batch)
        self._window.random.append(torch.get_rng_state())

    def _before_model(self, module: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._drawn.append(torch.get_rng_state())

    def __enter__(self) -> AccumulationCheck:
        self._before = self._window.gradient_now()
        if self.scheduler is not None:
            self._scheduler_start = int(self.scheduler.last_epoch)
        self._removable.append(register_optimizer_step_pre_hook(self._before_step))
        self._removable.append(self.model.register_forward_pre_hook(self._before_model))
        for module in self.model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                self.sent = 0
                self._removable.append(module.register_forward_pre_hook(self._before_forward))
        return self

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self.optimizer is not None and optimizer is not self.optimizer:
            return
        if not any(id(part.parameter) in stepped for part in self._window.parts):
            return
        self._optimizer_steps += 1
        if self._gradient is None:
            self._gradient = self._window.gradient_now()
            self._window.weights = [
                local(part.parameter.detach()).clone() for part in self._window.parts
            ]

    def _before_forward(self, module: Any, _: Any) -> None:
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self.sent = (self.sent or 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._removable:
            handle.remove()
        if error is not None:
            return
        if self.scheduler is not None:
            self._scheduler_steps = int(self.scheduler.last_epoch) - self._scheduler_start
        if self._gradient is None:
            self._gradient = self._window.gradient_now()
        if not self._window.batches:
            raise ValueError("no microbatch was fed: call check.batch(batch) before each")
        if len(self._drawn) == len(self._window.batches):
            self._window.random = self._drawn
        self._compare(self._gradient)
        self._done = True

    def report(self) -> str:
        """Return the report on rank 0, an empty text elsewhere."""
        if not self._done:
            raise ValueError("the window was not run: report after it")
        return self._text() if self._ranks.rank == 0 else ""

    def strict(self) -> None:
        """Raise an :class:`AccumulationError` on every rank if anything is wrong."""
        self.report()
        if self.faults:
            raise AccumulationError(self._text())

    def _text(self) -> str:
        lines = [headline("check_accumulation", self.faults)]
        lines += [f"  {number}. {text}" for number, text in enumerate(self.faults, 1)]
        number = len(self._window.batches)
        lines.append(f"  {number} microbatches, gradient off by {self.error:.2g} of its norm")
        if self.sent is not None:
            lines.append(f"  gradients were sent after {self.sent} of them")
        return "\n".join(lines)

    def _compare(self, gradient: Gradient) -> None:
        """Fill ``faults``; every rank gets the same ones."""
        window = self._window
        counts = window.count_items()
        total = math.fsum(sum(row) for row in counts)
        if not total > 0:
            raise ValueError("the loss counts no items in this window")
        tolerance = max(_TOLERANCE.get(part.parameter.dtype, 1e-4) for part in window.parts)
        reference = window.gradient([self._ranks.size / total] * len(window.batches))
        fit = window.fit(gradient, reference)
        self.error = fit.error
        if not self.error <= tolerance:
            accumulated = window_faults.Accumulated(
                window=window,
                gradient=gradient,
                reference=reference,
                before=self._before,
                counts=counts,
                full=self.steps,
            )
            self.faults.append(window_faults.of_gradient(accumulated, fit, tolerance))
        self._check_steps("scheduler", self._scheduler_steps)
        self._check_steps("optimizer", self._optimizer_steps)
        self._check_messages()

    def _check_steps(self, what: str, steps: int) -> None:
        """Name steps of the scheduler or the optimizer that are too many."""
        if steps > 1:
            microbatches = len(self._window.batches)
            often = "once per microbatch" if steps == microbatches else "in one window"
            self.faults.append(f"the {what} was stepped {steps} times: {often}")

    def _check_messages(self) -> None:
        """Name messages between ranks that are too many or too few."""
        number = len(self._window.batches)
        if self.sent is None or self._ranks.size == 1 or number == 1:
            return
        if self.sent > 1:
            self.faults.append(
                f"gradients were sent {self.sent} times for {number} microbatches: no_sync() is "
                "missing around all but the last"
            )
        elif self.sent == 0:
            self.faults.append("gradients were never sent: ranks differ")
