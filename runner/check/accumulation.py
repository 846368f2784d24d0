"""Compare the gradient of a window of microbatches with that of the sum over its items."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.check.parts import Part, inner_model, parts_of
from runner.check.ranks import Ranks
from runner.clip.functional import is_boosted
from runner.config.notation import first_few, ranks_as_text
from runner.gradients.shard import local

SumOfLosses = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""Returns the sum of the item losses of a microbatch, and the number of its items."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class AccumulationError(RuntimeError):
    """The accumulation that was checked is wrong; the message is the report."""


def check_accumulation(
    step: Callable[[list[Any]], Any],
    batches: Sequence[Any],
    *,
    model: nn.Module,
    loss: SumOfLosses,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    steps: int | None = None,
    timeout: float = 300.0,
) -> AccumulationCheck:
    """Run one window of a loop, and check its gradient; on every rank.

    ``step(batches)`` runs the forward and backward passes of all microbatches as the loop does, and
    may step the optimizer: the gradient is then read just before the step, so clip after the check
    or leave it out. The reference is the gradient of Σ item losses ÷ Σ items over all
    microbatches and data-parallel ranks, from one more pass over the same batches with the same
    random numbers. In a loop that cannot be called, feed an :class:`AccumulationCheck` instead.

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
        model: what ``step`` trains: plain, DistributedDataParallel, or ``fully_shard``.
        loss: returns the sum of item losses, a 0-dim tensor with a graph, and the number of items.
        optimizer: its steps are counted; by default those of every optimizer.
        scheduler: its steps are counted.
        steps: microbatches of a full window, to name a division by it in a short one.
        timeout: seconds to wait for other ranks.

    Returns:
        The check, to be reported.

    Raises:
        TypeError: the model is no module, or is wrapped by FSDP 1.
        ValueError: the model was boosted, or a window without items.
    """
    check = AccumulationCheck(
        model, loss, optimizer=optimizer, scheduler=scheduler, steps=steps, timeout=timeout
    )
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

    It keeps the batches, and takes memory for two copies of this rank's gradients. Weights,
    gradients, buffers and random states are as they were after the window. Arguments are those of
    :func:`check_accumulation`. Entering, leaving and reporting are collectives of all ranks.

    Attributes:
        error: relative error of the gradient, ‖G − reference‖ ÷ ‖reference‖.
        sent: microbatches after which gradients were sent to other ranks; None if not known.
        faults: sentences that name what is wrong.
        notes: sentences on what is not wrong, but worth knowing.
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
        self.inner = inner_model(model)
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.steps = steps
        self.error = math.nan
        self.sent: int | None = None
        self.faults: list[str] = []
        self.notes: list[str] = []
        self._ranks = Ranks(timeout)
        self._parts, _ = parts_of(self.inner, None)
        self._parts = [part for part in self._parts if part.parameter.requires_grad]
        self._batches: list[Any] = []
        self._random: list[Tensor] = []  # random state when each microbatch was fed
        self._drawn: list[Tensor] = []  # and before each forward pass of the model
        self._before: list[Tensor | None] = []
        self._gradient: list[Tensor | None] | None = None  # None until it is read
        self._weights: list[Tensor] = []  # before the optimizer stepped, if it did
        self._optimizer_steps = 0
        self._scheduler_start = 0
        self._scheduler_steps = 0
        self._removable: list[Any] = []
        self._shards = _is_fully_sharded(self.inner)
        self._done = False

    def batch(self, batch: Any) -> None:
        """Feed the microbatch that is trained on next."""
        self._batches.append(batch)
        self._random.append(torch.get_rng_state())

    def _before_model(self, module: Any, _: Any) -> None:
        if torch.is_grad_enabled():
            self._drawn.append(torch.get_rng_state())

    def __enter__(self) -> AccumulationCheck:
        self._before = self._gradients()
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
        if not any(id(part.parameter) in stepped for part in self._parts):
            return
        self._optimizer_steps += 1
        if self._gradient is None:
            self._gradient = self._gradients()
            self._weights = [local(part.parameter.detach()).clone() for part in self._parts]

    def _before_forward(self, module: Any, _: Any) -> None:
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self.sent = (self.sent or 0) + 1

    def _gradients(self) -> list[Tensor | None]:
        copies: list[Tensor | None] = []
        for part in self._parts:
            gradient = part.gradient
            copies.append(None if gradient is None else gradient.clone())
        return copies

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
            self._gradient = self._gradients()
        if not self._batches:
            raise ValueError("no microbatch was fed: call check.batch(batch) before each")
        if len(self._drawn) == len(self._batches):
            self._random = self._drawn
        self._compare()
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
        count = len(self.faults)
        head = f"{count} fault{'' if count == 1 else 's'}" if count else "right"
        lines = [f"check_accumulation: {head}"]
        lines += [f"  {number}. {text}" for number, text in enumerate(self.faults, 1)]
        lines.append(
            f"  {len(self._batches)} microbatches, gradient off by {self.error:.2g} of its norm"
        )
        if self.sent is not None:
            lines.append(f"  gradients were sent after {self.sent} of them")
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join(lines)

    # The comparison

    def _compare(self) -> None:
        """Fill ``faults``; every rank gets the same ones."""
        gradient = self._gradient
        assert gradient is not None
        counts = self._count()
        total = math.fsum(sum(rank) for rank in counts)
        if not total > 0:
            raise ValueError("the loss counts no items in this window")
        size = self._ranks.size
        tolerance = max(_TOLERANCE.get(part.parameter.dtype, 1e-4) for part in self._parts)
        here = counts[self._ranks.rank]
        reference = self._pass([size / total] * len(here))
        scale, residual, self.error = self._fit(gradient, reference)
        if not self.error <= tolerance:
            self._explain(gradient, reference, counts, (scale, residual), tolerance)
        self._check_calls(counts)

    def _count(self) -> list[list[float]]:
        """Return the items of each microbatch on each rank."""
        here: list[float] = []
        with torch.no_grad(), self._restored():
            for batch, random in zip(self._batches, self._random, strict=True):
                torch.set_rng_state(random)
                _, items = self.loss(self.inner, batch)
                here.append(float(items))
        counts: list[list[float]] = self._ranks.gather(here)
        return counts

    def _pass(self, weights: Sequence[float]) -> list[Tensor | None]:
        """Return the gradient of Σ weight·(sum of losses), averaged over ranks."""
        with self._restored(), torch.enable_grad():
            if self._shards:
                return self._sharded_pass(weights)
            found = self._local_pass(weights)
        if self._ranks.group is not None:
            for number, part in enumerate(self._parts):
                value = found[number]
                if value is None:
                    value = torch.zeros_like(local(part.parameter.detach()))
                dist.all_reduce(value, group=self._ranks.group)
                found[number] = value.div_(self._ranks.size)
        return found

    def _local_pass(self, weights: Sequence[float]) -> list[Tensor | None]:
        """Return this rank's gradient, without the hooks of DistributedDataParallel."""
        parameters = [part.parameter for part in self._parts]
        found: list[Tensor | None] = [None] * len(parameters)
        for batch, random, weight in zip(self._batches, self._random, weights, strict=True):
            torch.set_rng_state(random)
            losses, _ = self.loss(self.inner, batch)
            gradients = torch.autograd.grad(losses * weight, parameters, allow_unused=True)
            found = _added(found, [None if g is None else local(g) for g in gradients])
        return found

    def _sharded_pass(self, weights: Sequence[float]) -> list[Tensor | None]:
        """Return this rank's shards of the gradient, which ``fully_shard`` averages."""
        kept = [part.parameter.grad for part in self._parts]
        for part in self._parts:
            part.parameter.grad = None
        try:
            for batch, random, weight in zip(self._batches, self._random, weights, strict=True):
                torch.set_rng_state(random)
                losses, _ = self.loss(self.inner, batch)
                (losses * weight).backward()  # type: ignore[no-untyped-call]
            return self._gradients()
        finally:
            for part, gradient in zip(self._parts, kept, strict=True):
                part.parameter.grad = gradient

    def _restored(self) -> _Restored:
        return _Restored(self.inner, self._parts, self._weights)

    def _fit(
        self, gradient: Sequence[Tensor | None], other: Sequence[Tensor | None]
    ) -> tuple[float, float, float]:
        """Return α of the best fit G ≈ α·R, ‖G − α·R‖ ÷ ‖G‖, and ‖G − R‖ ÷ ‖R‖; a collective."""
        products = [0.0, 0.0, 0.0]
        for first, second in zip(gradient, other, strict=True):
            g = None if first is None else first.double().reshape(-1)
            r = None if second is None else second.double().reshape(-1)
            if g is not None:
                products[0] += float(torch.dot(g, g))
            if r is not None:
                products[1] += float(torch.dot(r, r))
            if g is not None and r is not None:
                products[2] += float(torch.dot(g, r))
        ranks = self._ranks.gather(products)
        square, known, both = (math.fsum(rank[i] for rank in ranks) for i in range(3))
        if not (math.isfinite(square) and known > 0):
            return math.nan, math.inf, math.inf if square != known else 0.0
        scale = both / known
        off = max(square - 2 * both + known, 0.0)
        rest = max(square - both * both / known, 0.0)
        return scale, math.sqrt(rest / square) if square else 0.0, math.sqrt(off / known)

    def _explain(
        self,
        gradient: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
        counts: Sequence[Sequence[float]],
        fit: tuple[float, float],
        tolerance: float,
    ) -> None:
        """Add the name of the mistake that gives this gradient."""
        tolerance = max(tolerance, 1e-6)
        scale, residual = fit
        items = "; ".join(
            f"{first_few([f'{count:g}' for count in row], 8)} on {ranks_as_text([rank])}"
            for rank, row in enumerate(counts)
        )
        if residual <= tolerance:
            self.faults.append(self._of_scale(scale, counts, "the gradient"))
            return
        for name, candidate in self._candidates(counts, reference):
            factor, rest, _ = self._fit(gradient, candidate)
            if rest <= tolerance:
                text = f"{name} (items: {items})"
                if not _is(factor, 1.0):
                    text += f"; and {self._of_scale(factor, counts, 'that')}"
                self.faults.append(text)
                return
        self.faults.append(
            f"the gradient is not that of Σ losses ÷ Σ items: off by {self.error:.3g} of its norm, "
            f"and no known mistake gives it (items: {items}); other samples, other random numbers, "
            "or batch norm, would"
        )

    def _candidates(
        self, counts: Sequence[Sequence[float]], reference: Sequence[Tensor | None]
    ) -> Iterator[tuple[str, list[Tensor | None]]]:
        """Yield mistakes, and the gradients that they give."""
        here = counts[self._ranks.rank]
        number = len(here)
        means = [1 / (count * number) if count else 0.0 for count in here]
        yield (
            "a mean of means: each microbatch counts the same, however many items it has",
            self._pass(means),
        )
        if self._ranks.size > 1:
            total = math.fsum(here)
            yield (
                "each rank divides by its own items, not by those of all ranks",
                self._pass([1 / total if total else 0.0] * number),
            )
        last = [0.0] * (number - 1) + [1 / here[-1] if here[-1] else 0.0]
        yield "only the last microbatch counts: gradients were zeroed between", self._pass(last)
        first = [1 / here[0] if here[0] else 0.0] + [0.0] * (number - 1)
        yield "only the first microbatch counts", self._pass(first)
        if any(gradient is not None for gradient in self._before):
            yield (
                "gradients of the window before were added: zero_grad() is missing",
                _added(reference, self._before),
            )
        if self._ranks.size > 1 and not self._shards:
            alone = self._alone([1 / max(math.fsum(here), 1.0)] * number)
            yield "the gradient of this rank alone: it was never sent", alone
            alone = self._alone(means)
            yield "the gradient of this rank alone, as a mean of means: it was never sent", alone

    def _alone(self, weights: Sequence[float]) -> list[Tensor | None]:
        """Return the gradient of this rank's items alone."""
        group = self._ranks.group
        self._ranks.group = None
        try:
            return self._pass(weights)
        finally:
            self._ranks.group = group

    def _of_scale(self, scale: float, counts: Sequence[Sequence[float]], what: str) -> str:
        """Return what a gradient of the right direction, but of another length, comes from."""
        number = len(self._batches)
        size = self._ranks.size
        total = math.fsum(sum(row) for row in counts)
        text = f"{what} is {scale:.4g} times what it should be"
        if self.steps and self.steps != number and _is(scale, number / self.steps):
            return (
                f"{text}: divided by the full window of {self.steps} microbatches, but this one "
                f"has {number}"
            )
        reasons = [
            (float(number), "not divided by the number of microbatches"),
            (1 / number, "divided twice by the number of microbatches"),
            (total, "losses were added, and not divided by the number of items"),
            (total / size, "losses were added, and not divided by the number of items"),
            (total / number, "losses were divided by the number of microbatches, not of items"),
            (float(size), "added over ranks instead of averaged"),
            (1 / size, "averaged twice over ranks"),
            (float(number * size), "not divided by the number of microbatches, nor of ranks"),
            (2.0, "each microbatch was added twice"),
        ]
        for factor, reason in reasons:
            if not _is(factor, 1.0) and _is(scale, factor):
                return f"{text}: {reason}"
        for full in range(number + 1, 65):
            if _is(scale, number / full):
                return f"{text}: divided by a full window of {full}, but this one has {number}"
        if scale < 1:
            return f"{text}: was it clipped inside of the window?"
        return f"{text}: was it scaled for fp16?"

    def _check_calls(self, counts: Sequence[Sequence[float]]) -> None:
        """Name steps of scheduler and optimizer, and messages, that are too many."""
        number = len(self._batches)
        if self._scheduler_steps > 1:
            often = "once per microbatch" if self._scheduler_steps == number else "in one window"
            self.faults.append(f"the scheduler was stepped {self._scheduler_steps} times: {often}")
        if self._optimizer_steps > 1:
            often = "once per microbatch" if self._optimizer_steps == number else "in one window"
            self.faults.append(f"the optimizer was stepped {self._optimizer_steps} times: {often}")
        if self.sent is not None and self._ranks.size > 1 and number > 1:
            if self.sent > 1:
                self.faults.append(
                    f"gradients were sent {self.sent} times for {number} microbatches: no_sync() "
                    "is missing around all but the last"
                )
            elif self.sent == 0:
                self.faults.append("gradients were never sent: ranks differ")


class _Restored:
    """Uses the weights of the window; what a pass changes is put back after it."""

    def __init__(self, model: nn.Module, parts: Sequence[Part], weights: Sequence[Tensor]) -> None:
        self._model = model
        self._pairs = [
            (local(part.parameter.detach()), weight)
            for part, weight in zip(parts, weights, strict=False)
        ]

    @torch.no_grad()
    def __enter__(self) -> None:
        self._random = torch.get_rng_state()
        self._kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        for current, weight in self._pairs:
            self._kept.append((current, current.clone()))
            current.copy_(weight)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._random)
        for tensor, kept in self._kept:
            tensor.copy_(kept)


def _is_fully_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _added(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    sums: list[Tensor | None] = []
    for a, b in zip(first, second, strict=True):
        sums.append(b if a is None else a if b is None else a + b)
    return sums


def _is(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-3 * abs(other)
