"""The boosted optimizer: it owns unscale, measure, clip and step, and their order.

A gradient is clipped only when it is final. The wrapper keeps where a step stands
(:class:`StepState`) and refuses what would give a wrong number: clipping an accumulating gradient,
clipping twice, clipping nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runner.booster.precision import LossScale
from runner.clip import ClipMode, Layout, Number, Outcome, build, total_norm, transfer
from runner.clip.norms import norms

Nonfinite = Literal["skip", "error", "ignore"]


def nothing() -> None:
    """Where nothing is to be done."""


class StepState(Enum):
    """Where an optimizer step stands."""

    EMPTY = "no backward pass has run since the last step"
    ACCUMULATING = (
        "the last backward pass ran under no_sync, so its gradients are not final: run the last "
        "microbatch of a step outside of no_sync, forward and backward pass"
    )
    READY = "gradients are final"
    CLIPPED = "gradients were clipped already in this step"


Written = tuple["ReferenceType[Tensor]", int]
"""A gradient, and how often it was written to."""


def _written(layout: Layout) -> Written | None:
    """The last gradient that there is: the one nearest to the loss, which every backward pass adds
    to or replaces.
    """
    for shard in reversed(layout.shards):
        gradient = shard.param.grad
        if gradient is not None:
            part = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            return ref(part), part._version
    return None


def _is_other(now: Written | None, before: Written | None) -> bool:
    """Whether there is a gradient now that was not there, or was written to since."""
    if now is None or before is None:
        return now is not None
    # By identity: to ask whether tensors are equal would ask it of their elements.
    return before[0] is not now[0] or before[1] != now[1]


class StepOrderError(RuntimeError):
    """Gradients were clipped, or a step was asked for, at a time when the result would be wrong."""


class NonFiniteGradient(FloatingPointError):
    """A gradient holds NaN or inf, and the policy is to stop."""


class OptimizerWrapper:
    """One or several optimizers whose gradients live where ``layout`` says.

    Several optimizers (Muon for matrices and AdamW for the rest, say) make one step together: one
    norm over all gradients, one decision whether the step is finite, one clipping.

    Args:
        optimizer: the user's optimizer, over the boosted model's parameters, or a list of them.
        layout: where its gradients live.
        loss_scale: the fp16 scale, or None.
        nonfinite: what to do with a gradient that is not finite: ``skip`` the step, raise an
            ``error``, or ``ignore`` it (the step is taken, unclipped). An fp16 overflow is skipped
            whatever the policy, because the next, smaller scale mends it.
        sync_grads: makes the gradients final, on every rank, once a step before they are looked at.
        broadcast_params: called on every rank after the optimizer has stepped.
        max_norm: above 0, a step limits the norm of a gradient that was not clipped before.

    Attributes:
        optimizers: the user's optimizers, in the order in which they were given.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        layout: Layout,
        loss_scale: LossScale | None = None,
        nonfinite: Nonfinite = "skip",
        sync_grads: Callable[[], None] = nothing,
        broadcast_params: Callable[[], None] = nothing,
        max_norm: float = 0.0,
    ) -> None:
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.layout = layout
        self.loss_scale = loss_scale
        self.nonfinite = nonfinite
        self.stage = StepState.EMPTY
        self.accumulating = False
        self._sync_grads = sync_grads
        self._broadcast_params = broadcast_params
        self._max_norm = max_norm
        self._final = False
        self._unscaled = False
        self._scaled = False
        self._held = False
        self._left: Written | None = None
        self._start: tuple[float, Tensor] | None = None
        self._finite: bool | Tensor | None = None
        self._shares: bool | None = None
        self._taken: bool | Callable[[], float] = False
        # A rank may step other parameters than its peers, by other kernels; all decide alike.
        fused = float(all(group.get("fused") for group in self.param_groups))
        self._fused = all(float(each) for each in layout.gather([fused])[0])
        self._modes: dict[tuple[str, float], ClipMode] = {}

    # -- one step, in order -------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Backward pass of ``loss * weight``, scaled under fp16.

        The factors start the backward pass as its gradient, so they cost no node of the graph.

        Raises:
            StepOrderError: the gradients of this step were made final or clipped already.
            ValueError: the loss is not one number.
        """
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: reduce it to one number")
        weight = self.begin_backward(weight)
        start = self._start
        known = None if start is None else (start[0], start[1].dtype, start[1].shape)
        if start is None or known != (weight, loss.dtype, loss.shape):
            start = self._start = (weight, loss.new_full(loss.shape, weight))
        loss.backward(start[1])  # type: ignore[no-untyped-call]
        self.end_backward()

    def begin_backward(self, weight: float = 1.0) -> float:
        """What a loss is multiplied with before its backward pass, for whoever runs that himself.

        Raises:
            StepOrderError: as :meth:`backward`.
        """
        if self._final or self.stage is StepState.CLIPPED:
            raise StepOrderError(f"cannot accumulate now: {self.stage.value}")
        self._scaled, self._held = True, False
        return weight if self.loss_scale is None else weight * self.loss_scale.scale

    def end_backward(self) -> None:
        """Note that a backward pass was run."""
        held = self.accumulating or self._held
        self.stage = StepState.ACCUMULATING if held else StepState.READY
        self._separate()

    def watch(self, output: Tensor, held: bool) -> None:
        """Note the backward pass through an output of the model, also a plain ``loss.backward()``.

        Args:
            output: a tensor that the forward pass returned.
            held: whether that pass has decided that gradients are not synchronised.
        """
        if output.requires_grad and not output.is_leaf:
            output.register_hook(partial(self._reached, held))  # type: ignore[no-untyped-call]

    def _reached(self, held: bool, gradient: Tensor) -> None:
        if self.stage is not StepState.CLIPPED:
            self._held = held
            self.end_backward()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of backward passes whose gradients are not final, whoever runs them."""
        self.accumulating, before = True, _written(self.layout)
        try:
            yield
        finally:
            self.accumulating = False
            if self.stage is StepState.EMPTY and _is_other(_written(self.layout), before):
                self.stage = StepState.ACCUMULATING

    @torch.no_grad()
    def clip(self, mode: ClipMode) -> Outcome:
        """Unscale, measure ‖G‖, agree whether it is finite, and clip by ``mode`` in place.

        Every rank decides from the same reduced norm, so all of them skip or none.

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
            NonFiniteGradient: they are not finite and the policy is ``error``.
        """
        self.begin_clip()
        norm = total_norm(self.layout, mode.norm_type)
        self.stage = StepState.CLIPPED
        if not self._proceed(norm):
            return Outcome.skipped(norm, mode.threshold)
        outcome = mode.clip(self.layout, norm)
        return outcome.unless(self._finite) if isinstance(self._finite, Tensor) else outcome

    def begin_clip(self) -> None:
        """Make the gradients ready to be clipped: synchronised and unscaled.

        Raises:
            StepOrderError: as :meth:`clip`.
        """
        if self.stage is StepState.CLIPPED or self.stage is StepState.ACCUMULATING:
            raise StepOrderError(f"cannot clip now: {self.stage.value}")
        # A rank of a model that is split may have none after a backward pass: its peers wait for it
        # in the collectives.
        waited_for = self.stage is StepState.READY and self.layout.group is not None
        if not waited_for and not self._has_gradients():
            raise StepOrderError(f"cannot clip now: {StepState.EMPTY.value}")
        self.unscale()

    def step(self, closure: Callable[[], float] | None = None) -> bool:
        """Take the step, unless the gradients were found not to be finite.

        Returns:
            Whether it was taken. True on an accelerator whose fused optimizer decides for itself:
            :meth:`was_taken` then tells.

        Raises:
            StepOrderError: the last backward pass ran under ``no_sync``.
            ValueError: there are several optimizers, and a closure that each of them would run.
        """
        if closure is not None and len(self.optimizers) > 1:
            raise ValueError(
                "a closure goes with one optimizer: run it before step(), which has several"
            )
        if self.stage is StepState.ACCUMULATING:
            raise StepOrderError(f"cannot step now: {self.stage.value}")
        # An output of a class that pytree does not know leaves no note of its backward pass.
        ready = self.stage is StepState.READY or (
            self.stage is StepState.EMPTY and self._has_gradients()
        )
        if self._max_norm > 0 and ready:
            self.clip_grad_by_norm(self._max_norm)
        if self.loss_scale is not None and self._finite is None:
            with torch.no_grad():
                self.unscale()
                self._finite = bool(math.isfinite(total_norm(self.layout)))
        self._make_final()
        finite = self._finite
        if self.loss_scale is not None:
            self.loss_scale.update(bool(finite))
        if finite is not False and any(group.get("fused") for group in self.param_groups):
            self._match_strides()
        self._forget(_written(self.layout))
        self._taken = (
            transfer.read_later(finite) if isinstance(finite, Tensor) else finite is not False
        )
        if finite is False:
            return False
        if isinstance(finite, Tensor) and self._starts_momentum():
            finite = bool(finite)
        # Without a step of its own a rank still publishes: others may leave theirs to the device.
        for optimizer in self.optimizers if finite is not False else ():
            if isinstance(finite, Tensor):
                # The fused kernels read the flag on the device: the host is not asked.
                optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            try:
                optimizer.step(closure)
            finally:
                if isinstance(finite, Tensor):
                    del optimizer.found_inf  # type: ignore[attr-defined]
        self._broadcast_params()
        return True

    def was_taken(self) -> bool:
        """Return whether the last call of :meth:`step` took a step.

        Where a fused optimizer decides that on an accelerator, this waits for the decision, but not
        for work that was queued later: call it after the next backward pass.
        """
        return self._taken if isinstance(self._taken, bool) else bool(self._taken())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        # All parameters, also those that no group of an optimizer holds: they would pile up.
        for shard in self.layout.shards:
            if set_to_none:
                shard.param.grad = None
            elif shard.param.grad is not None:
                shard.param.grad.zero_()
        self._forget(None if set_to_none else _written(self.layout))

    def unscale(self) -> None:
        """Make the gradients final and divide them by the fp16 scale, once a step, in place.

        Raises:
            StepOrderError: no backward pass has scaled its loss.
            TypeError: a gradient is float16 itself: what the scale saved would be lost again.
        """
        self._make_final()
        if self.loss_scale is None or self._unscaled:
            return
        shards, gradients = self.layout.gradients()
        if gradients and not self._scaled:
            raise StepOrderError(
                "the loss was not scaled, as fp16 needs it: call booster.backward(loss, optimizer) "
                "instead of loss.backward()"
            )
        half = [p.name for p, g in zip(shards, gradients, strict=True) if g.dtype == torch.float16]
        if half:
            raise TypeError(f"{half[0]} is float16: keep parameters in float32, precision casts")
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale.scale)
        self._unscaled = True

    # -- clipping by one call, under the names of Colossal-AI's optimizer wrapper ---------------

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Limit the norm of the whole gradient to ``max_norm``.

        Returns:
            The norm before clipping: a 0-dimensional float32 tensor, the same on every rank.

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
            NonFiniteGradient: the norm is not finite and ``error_if_nonfinite`` is set.
        """
        outcome = self.clip(self._mode("norm", max_norm, norm_type))
        norm = torch.as_tensor(outcome.norm, dtype=torch.float32)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm.item()}")
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the gradient to [-clip_value, clip_value].

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
        """
        self.clip(self._mode("value", clip_value, 2.0))

    # -- the rest of an optimizer -----------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def unwrap(self) -> Optimizer:
        """The user's optimizer.

        Raises:
            RuntimeError: there are several: they are in ``optimizers``.
        """
        if len(self.optimizers) > 1:
            raise RuntimeError(
                f"{len(self.optimizers)} optimizers were boosted together: use .optimizers"
            )
        return self.optimizers[0]

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizers (ZeRO stage 1: of this rank's share) and of the fp16 scale.

        Returns:
            ``optimizer``: the state of the one optimizer, or a list with the state of each;
            ``loss_scale``: the state of the scale, or None.
        """
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        return {"optimizer": states if len(states) > 1 else states[0], "loss_scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is that of another number of optimizers.
        """
        given = state["optimizer"]
        states = given if isinstance(given, list) else [given]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the state is that of {len(states)} optimizers, but {len(self.optimizers)} "
                "were boosted"
            )
        for optimizer, own in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(own)
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _make_final(self) -> None:
        if not self._final:
            self._separate()
            self._sync_grads()
            self._final = True

    def _separate(self) -> None:
        """Separate gradients that share memory, if the first backward pass made any."""
        if self._shares is not False and (self._shares or self._has_gradients()):
            self._shares = self.layout.separate_gradients() or self._shares is True

    def _has_gradients(self) -> bool:
        """Whether there are gradients, and not those of an earlier step alone."""
        now, left = _written(self.layout), self._left
        if left is None or self.stage is not StepState.EMPTY:
            return now is not None
        return _is_other(now, left)

    def _forget(self, left: Written | None) -> None:
        """Begin a step, with the last gradient ``left`` of an earlier one."""
        self.stage, self._finite, self._left = StepState.EMPTY, None, left
        self._final = self._unscaled = self._scaled = self._held = False

    def _mode(self, name: str, threshold: float, norm_type: float) -> ClipMode:
        mode = self._modes.get((name, norm_type))
        if mode is None or mode.threshold != threshold:
            mode = build(name, threshold=threshold, norm_type=norm_type)
            self._modes[name, norm_type] = mode
        return mode

    def _proceed(self, norm: Number) -> bool:
        """Whether the gradients may be clipped; notes whether the step may be taken."""
        if isinstance(norm, Tensor):
            finite = torch.isfinite(norm)
            if self._fused and self.loss_scale is None and self.nonfinite == "skip":
                self._finite = finite
                return True
            host = bool(finite)
        else:
            host = math.isfinite(norm)
        if host:
            self._finite = True
            return True
        if self.loss_scale is None and self.nonfinite == "error":
            raise NonFiniteGradient(f"the gradient's norm is {float(norm)}: {self._culprits()}")
        self._finite = self.nonfinite == "ignore" and self.loss_scale is None
        return False

    def _starts_momentum(self) -> bool:
        """Return whether a step would allocate momentum buffers on this rank.

        torch's fused SGD leaves them uninitialised if ``found_inf`` skips that step; the next one
        would add their contents to the weights.
        """
        return any(
            parameter.grad is not None and parameter not in optimizer.state
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if group.get("momentum")
            for parameter in group["params"]
        )

    def _culprits(self) -> str:
        names = [name for name, norm in norms(self.layout).items() if not math.isfinite(norm)]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"{', '.join(names[:5])}{more} (clip.nonfinite=skip leaves such steps out)"

    def _match_strides(self) -> None:
        """Give every gradient its parameter's strides.

        torch's fused CPU kernels walk both in memory order and ignore strides: a channels-last
        gradient of a contiguous parameter would move the wrong weights, in silence.
        """
        for shard in self.layout.shards:
            gradient = shard.param.grad
            if gradient is not None and gradient.stride() != shard.param.stride():
                shard.param.grad = torch.empty_like(shard.param).copy_(gradient)
