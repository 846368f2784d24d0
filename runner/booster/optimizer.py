"""The boosted optimizer: it unscales, measures, clips and steps, in this order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer

from runner.booster.fused import Fold, match_strides, step_where
from runner.booster.in_backward import NOT_FINAL, InBackward, require_possible
from runner.booster.nonfinite import Nonfinite, NonFiniteGradient, finding
from runner.booster.precision import LossScale
from runner.booster.spikes import Spikes, at_once
from runner.booster.step_order import StepOrder, StepOrderError, StepState
from runner.booster.unchanged import BoostedGroups, BoostedParameters
from runner.clip import ClipMode, Decision, GradStats, Layout, Number, build, total_norm, transfer
from runner.clip.decision import Direction
from runner.clip.mode import scale
from runner.clip.norms import Powers
from runner.clip.skip import SkipRule
from runner.parallel.final_gradients import Final
from runner.parallel.gradient_sync import nothing


class OptimizerWrapper(StepOrder):
    """One or several optimizers that step together over the gradients of ``layout``.

    Several optimizers (Muon for matrices and AdamW for the rest, say) take one step together: one
    norm over all gradients, one decision whether the step is finite, one clipping.

    Args:
        optimizer: the user's optimizer over the parameters of the boosted model, or a list of
            optimizers.
        layout: where the gradients live.
        loss_scale: the fp16 loss scale, or None.
        nonfinite: what to do with a gradient that is not finite: ``skip`` the step, raise an
            ``error``, or ``ignore`` it (the step is taken without clipping). An fp16 overflow is
            always skipped, because the next, smaller scale corrects it.
        sync_grads: function that makes the gradients final; called on every rank, once a step,
            before they are read.
        broadcast_params: function called on every rank after the optimizer has stepped.
        max_norm: where above 0, :meth:`step` limits the norm of a gradient that was not clipped.
        watch_final: see :class:`runner.booster.plugin.ParallelModel`.
        skip: rule that skips steps whose loss or gradient norm is a spike, or None. It decides when
            the gradients are clipped, and in :meth:`step` where they were not.
        start_mean: see :class:`runner.booster.spikes.Spikes`.
        steps: ids of the parameters that this rank steps; None for all.
        boosted: the parameters that the models had when they were boosted, or None.

    Attributes:
        optimizers: the user's optimizers, in the order in which they were given.
        powers: share of each gradient in the norm that :meth:`clip` measured last, where it was
            asked for, or the norm is not finite, or lies on an accelerator; else None.
        in_backward: clips in the backward pass, after :meth:`clip_in_backward`; else None.
        direction: how :meth:`clip` turned the gradient last, see :meth:`Direction.sums`; None where
            that was not measured.
        decision: what :meth:`clip` decided last; :meth:`step` completes it, where the mode limits
            the update.
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
        watch_final: Callable[[Final], None] | None = None,
        skip: SkipRule | None = None,
        start_mean: Callable[[Number], Callable[[], Number]] = at_once,
        steps: frozenset[int] | None = None,
        boosted: BoostedParameters | None = None,
    ) -> None:
        super().__init__(layout)
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.loss_scale = loss_scale
        self.nonfinite = nonfinite
        self._sync_grads = sync_grads
        self._broadcast_params = broadcast_params
        self._max_norm = max_norm
        self.skip = skip
        self._spikes = Spikes(skip, start_mean)
        self.powers: Powers | None = None
        self.direction: Tensor | None = None
        self._norms: tuple[Number | None, Number | None] = (None, None)  # now; of the last step
        self._fold = Fold(self.optimizers, layout)
        self._coef: Number = 1.0  # what the next step multiplies gradients by,
        self._some = False  # leaving out those that the layout leaves unscaled
        self._final = False
        self._unscaled = False
        self._scaled = False
        self._start: tuple[Any, Tensor] | None = None  # gradient that the backward pass starts from
        self._finite: bool | Tensor | None = None  # whether to take the step; None while unknown
        self._taken: bool | Callable[[], float] = False
        self.boosted = boosted
        self._groups = BoostedGroups(self.optimizers, layout, steps)
        self._fused = self._all_fused()
        self._modes: dict[tuple[str, float], ClipMode] = {}
        self.decision: Decision | None = None
        self._limiting: ClipMode | None = None  # mode that limits the update of the next step
        self._watch_final = watch_final
        self.in_backward: InBackward | None = None

    def _all_fused(self) -> bool:
        # Ranks may step different parameters by different kernels; all of them decide alike.
        fused = float(all(group.get("fused") for group in self.param_groups))
        return all(float(each) for each in self.layout.gather([fused])[0])

    def clip_in_backward(self, mode: ClipMode, *, step: bool = False, each: bool = False) -> None:
        """Clip each gradient in the backward pass, when it has become final, from now on.

        In each step call :meth:`clip` with the same mode, which then returns what was done, and
        :meth:`step` as ever. Gradients of a window are kept until its last backward pass.

        Args:
            mode: how to clip: a mode that decides tensor by tensor.
            step: whether each parameter is stepped beside its gradient, which is then freed: the
                memory of one gradient instead of all, where a step has one microbatch.
            each: whether the share of each gradient in the norm is wanted in ``powers``.

        Raises:
            ValueError: the mode, the plugin, an option of the booster or an optimizer does not
                allow it; the message says why.
        """
        watch = self._watch_final
        if self.in_backward is not None:
            raise ValueError("gradients are clipped in the backward pass already")
        if watch is None:
            raise ValueError(NOT_FINAL)
        require_possible(
            mode,
            self.optimizers,
            step=step,
            nonfinite=self.nonfinite,
            fp16=self.loss_scale is not None,
            skip=self.skip is not None,
        )
        self.bind(mode)
        self.in_backward = InBackward(
            self.layout, self.optimizers, mode, lambda: self.accumulating, steps=step, each=each
        )
        watch(self.in_backward.callback())

    @property
    def steps_in_backward(self) -> bool:
        """Whether backward passes step the parameters."""
        return self.in_backward is not None and self.in_backward.steps

    def _has_gradients(self) -> bool:
        clipped = self.in_backward is not None and self.in_backward.began
        return clipped or super()._has_gradients()

    def bind(self, mode: ClipMode) -> None:
        """Bind a clipping mode to the layout and to the optimizers; every rank calls it.

        Raises:
            ValueError: its options do not fit the layout, or it is not defined on the optimizers.
        """
        mode.bind(self.layout)
        mode.bind_optimizers(self.optimizers, self.layout)

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Run the backward pass of ``loss * weight``, scaled under fp16.

        The factors are the gradient that the backward pass starts from, so they add no node to the
        graph.

        Raises:
            StepOrderError: the gradients of this step were made final or clipped already.
            ValueError: the loss is not one number.
        """
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: reduce it to one number")
        key = (self.begin_backward(weight), loss.dtype, loss.shape)
        self.add_loss(loss, weight)
        if self._start is None or self._start[0] != key:
            self._start = (key, loss.new_full(loss.shape, key[0]))
        if type(loss) is Tensor:
            # As Tensor.backward, whose checks of its arguments take a tenth of a tiny step's pass.
            start = (self._start[1],)
            _engine_run_backward((loss,), start, False, False, (), True, accumulate_grad=True)
        else:
            loss.backward(self._start[1])  # type: ignore[no-untyped-call]
        self.end_backward()

    def begin_backward(self, weight: float = 1.0) -> float:
        """Return the factor of the loss, for callers that run the backward pass themselves.

        Raises:
            StepOrderError: as :meth:`backward`.
        """
        if self._final:
            raise StepOrderError(f"cannot accumulate now: {self.stage.value}")
        self._scaled, self._held = True, False
        return weight if self.loss_scale is None else weight * self.loss_scale.scale

    def add_loss(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add ``loss * weight`` to the loss of the step, for a skip rule that reads it.

        :meth:`backward` does, so this is for callers that run the backward pass themselves.

        Args:
            loss: loss of a microbatch on this rank; any value where another rank has it.
            weight: factor, without the fp16 scale. The mean over the data-parallel ranks of what a
                step adds up is the loss whose gradient it takes.
        """
        self._spikes.add(loss, weight)

    @torch.no_grad()
    def clip(
        self, mode: ClipMode, fold: bool = False, each: bool = False, direction: bool = False
    ) -> Decision:
        """Unscale, measure ‖G‖, agree whether it is finite, and clip by ``mode`` in place.

        Every rank decides from the same reduced norm, so all of them skip the step or none.

        Args:
            mode: how to clip.
            fold: whether :meth:`step` may multiply the gradients, which costs less where all
                optimizers are fused ones of torch. Each ``.grad`` is then clipped after the step,
                but not before.
            each: whether the share of each gradient in the norm is wanted in ``powers``.
            direction: whether ``direction`` is wanted.

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
            NonFiniteGradient: they are not finite and ``nonfinite`` is ``error``.
        """
        self.begin_clip()
        self.direction = None
        early = self.in_backward
        if early is not None and mode is not early.mode:
            raise ValueError("gradients are clipped in the backward pass: clip by the same mode")
        if early is not None and early.began:
            norm = early.finish()
            self._measured(norm, early.powers)
            self.decision = early.decide(norm, self._judge(norm))
            return self.decision
        if mode.info.needs_optimizer:
            mode.bind_optimizers(self.optimizers, self.layout)
        self.decision = self._clip(mode, fold, each, direction)
        self._limiting = None if self.decision.update is None else mode
        return self.decision

    def _measured(self, norm: Number, powers: Powers | None) -> None:
        self.powers = powers
        self._norms = norm, self._norms[1]
        self.stage = StepState.CLIPPED

    def _clip(self, mode: ClipMode, fold: bool, each: bool, direction: bool) -> Decision:
        """Measure, decide and apply, see :meth:`clip`."""
        waiting = self._spikes.start_loss()
        stats = mode.measure(self.layout, each or (direction and mode.scales_some(self.layout)))
        loss = waiting()
        self._measured(stats.norm, stats.powers)
        finite = self._judge(stats.norm)
        spike: Number = 0.0
        if self.skip is not None:
            known = isinstance(self._finite, bool)
            spike = self._spikes.decide(stats.norm, loss, finite, known)
            finite = self._spikes.left_out(finite)
        if finite is not stats.finite:
            stats = replace(stats, finite=finite)
        decision = self._apply(mode, stats, fold, direction)
        return decision if self.skip is None else replace(decision, spike=spike)

    def _apply(self, mode: ClipMode, stats: GradStats, fold: bool, direction: bool) -> Decision:
        """Decide and apply, see :meth:`clip`."""
        in_one_call = not fold or not mode.may_fold
        decision = None if in_one_call else mode.decide(self.layout, stats)
        if mode.info.clips is None:  # It has no need of a copy.
            known: Decision | None = Decision.untouched(stats.norm, None, stats.norm)
        else:
            known = decision
        compared = Direction(self.layout, known, stats.powers) if direction else None
        if decision is None:
            done = mode.clip(self.layout, stats)
        else:
            done = self._fold_or_apply(mode, decision)
        self.direction = None if compared is None else compared.sums()
        return done

    def _fold_or_apply(self, mode: ClipMode, decision: Decision) -> Decision:
        """Apply a decision, or leave it to the step where that can."""
        whole = decision.parts is None and decision.scales is None
        if whole and decision.finite is not False:
            some = decision.factor is not None
            factor = decision.coef if decision.factor is None else decision.factor
            if isinstance(factor, float) and factor == 1.0:
                return decision
            if self._fold.takes(factor, some):
                self._coef, self._some = factor, some
                return decision
        return mode.apply(self.layout, decision)

    def clip_and_step(self, mode: ClipMode) -> Decision:
        """Clip the gradients by ``mode`` and take the step, in one pass where that is possible.

        Fused SGD, Adam, AdamW and Adagrad of torch multiply float32 gradients while they step.
        After the call each ``.grad`` is the clipped gradient, whatever the optimizer.

        Returns:
            What clipping did. Whether the step was taken: :meth:`was_taken`.

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
            NonFiniteGradient: they are not finite and ``nonfinite`` is ``error``.
        """
        decision = self.clip(mode, fold=True)
        self.step()
        return self.decision or decision

    def begin_clip(self) -> None:
        """Make the gradients ready to be clipped: synchronised and unscaled.

        Raises:
            StepOrderError: as :meth:`clip`.
        """
        self.require_clippable()
        self.unscale()

    def step(self, closure: Callable[[], float] | None = None) -> bool:
        """Take the step, unless the gradients are not finite.

        Returns:
            Whether it was taken. True on an accelerator whose fused optimizer decides for itself:
            :meth:`was_taken` then returns the answer.

        Raises:
            StepOrderError: the last backward pass ran under ``no_sync``.
            ValueError: there are several optimizers, and a closure that each of them would run; or
                the model or a parameter group was changed, see :mod:`runner.booster.unchanged`.
        """
        if closure is not None and self.in_backward is not None:
            raise ValueError("a closure cannot be run: gradients are clipped in the backward pass")
        if closure is not None and len(self.optimizers) > 1:
            raise ValueError(
                "a closure goes with one optimizer: run it before step(), which has several"
            )
        finite, early = self._finish_gradients(closure), self.in_backward
        stepped = early is not None and early.steps and early.began
        if finite is not False and any(group.get("fused") for group in self.param_groups):
            match_strides(self.layout)
        coef, scaled = self._coef, self._fold.scaled(self._some)
        limiting, decision = self._limiting, self.decision
        self._norms = None, self._norms[0]
        self.begin_step(zeroed=False)
        self._taken = transfer.read_later(finite) if isinstance(finite, Tensor) else finite
        if finite is False:
            return False
        if limiting is not None and decision is not None:
            with torch.no_grad():
                limiting.before_step(self.layout, decision)
        if not stepped:
            run = None if closure is None else partial(self._run, closure)
            step_where(finite, self.optimizers, run, coef, scaled)
        if limiting is not None and decision is not None:
            with torch.no_grad():
                self.decision = limiting.after_step(self.layout, decision)
        # Also after a step that only this rank read to be skipped: others decide on the device.
        self._broadcast_params()
        return True

    def _run(self, closure: Callable[[], float]) -> float:
        """Run a closure, and make final the gradients that it computes."""
        loss = closure()
        if self.stage is not StepState.EMPTY and self.require_step():
            if self._max_norm > 0:
                self.clip(self._mode("norm", self._max_norm, 2.0))
            self.unscale()
        return loss

    def _finish_gradients(self, closure: Callable[[], float] | None) -> bool | Tensor:
        """Make the gradients final, within the plugin's limit; return whether to take the step."""
        early = self.in_backward
        if early is not None and self.stage is not StepState.CLIPPED and self.require_step():
            self.clip(early.mode)
        if self.require_step() and self._max_norm > 0:
            self.clip(self._mode("norm", self._max_norm, 2.0), fold=closure is None)
        elif self.skip is not None and self.require_step():
            self.clip(self._mode("none", None, 2.0))
        elif closure is not None:  # It may compute other gradients, which the step must not scale.
            scale(self.layout, self._coef, self._some)
            self._coef = 1.0
        if self.loss_scale is None:
            self.unscale()
            return self._spikes.left_out(True if self._finite is None else self._finite)
        if self._finite is None:
            with torch.no_grad():
                self.unscale()
                self._finite = bool(math.isfinite(total_norm(self.layout)))
        self.loss_scale.update(bool(self._finite))  # A spike is no overflow.
        return self._spikes.left_out(self._finite)

    def was_taken(self) -> bool:
        """Return whether the last call of :meth:`step` took a step.

        Where a fused optimizer decides that on an accelerator, this waits for the decision, but not
        for work that was queued later: call it after the next backward pass.
        """
        return self._taken if isinstance(self._taken, bool) else bool(self._taken())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters of the layout.

        Those that no group of an optimizer holds are reset too: they would add up over steps.
        """
        for shard in self.layout.shards:
            if set_to_none:
                shard.param.grad = None
            elif shard.param.grad is not None:
                shard.param.grad.zero_()
        self.begin_step(zeroed=set_to_none)

    def begin_step(self, zeroed: bool) -> None:
        """Begin the next step, see :meth:`StepOrder.begin_step`."""
        super().begin_step(zeroed)
        self._finite, self._limiting = None, None
        self._spikes.begin_step()
        self._coef, self._some = 1.0, False
        self._final = self._unscaled = self._scaled = False
        if self.in_backward is not None:
            self.in_backward.begin_step()

    def unscale(self) -> None:
        """Synchronise the gradients and divide them by the fp16 scale, once a step, in place.

        Raises:
            StepOrderError: no backward pass has scaled its loss.
            TypeError: a gradient is float16 itself: the scale would be lost in it.
        """
        if not self._final:
            if self.boosted is not None:
                self.boosted.require_final()
            if self._groups.have_changed():
                self._fused = self._all_fused()
            self._separate()
            self._sync_grads()
            self._final = True
        if self.loss_scale is None or self._unscaled:
            return
        self._divide_by_scale()
        self._unscaled = True

    def _divide_by_scale(self) -> None:
        assert self.loss_scale is not None
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

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Limit the norm of the whole gradient to ``max_norm``; a name of Colossal-AI's wrapper.

        The matrices that Muon steps are left as they are: ``max_norm`` limits all other gradients.
        :meth:`clip` by a mode with ``scales="all"`` limits all.

        Returns:
            The norm of the whole gradient before clipping: a 0-dimensional float32 tensor, the same
            on every rank.

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
            NonFiniteGradient: the norm is not finite and ``error_if_nonfinite`` is set.
        """
        decision = self.clip(self._mode("norm", max_norm, norm_type))
        norm = torch.as_tensor(decision.norm, dtype=torch.float32)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm.item()}", norm=norm.item())
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ±``clip_value``; a name of Colossal-AI's wrapper.

        Raises:
            StepOrderError: the gradients are not final, or were clipped already.
        """
        self.clip(self._mode("value", clip_value, 2.0))

    def get_grad_norm(self) -> float | None:
        """Return the norm before clipping in the last step; a name of Colossal-AI's wrapper.

        Returns:
            The norm, which an accelerator is waited for; None if that step did not clip.
        """
        norm = self._norms[1]
        return None if norm is None else float(norm)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def unwrap(self) -> Optimizer:
        """Return the user's optimizer.

        Raises:
            RuntimeError: there are several: they are in ``optimizers``.
        """
        if len(self.optimizers) > 1:
            raise RuntimeError(
                f"{len(self.optimizers)} optimizers were boosted together: use .optimizers"
            )
        return self.optimizers[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizers and of the fp16 scale.

        With ZeRO stage 1 it is the state of the parameters that this rank steps.

        Returns:
            ``optimizer``: the state of the one optimizer, or a list with the state of each;
            ``loss_scale``: the state of the scale, or None; ``skip``: the state of the skip rule,
            if there is one.
        """
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        saved = {"optimizer": states if len(states) > 1 else states[0], "loss_scale": scale}
        return saved if self.skip is None else saved | {"skip": self.skip.state_dict()}

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
        if self.skip is not None and "skip" in state:
            self.skip.load_state_dict(state["skip"])

    def _mode(self, name: str, threshold: float | None, norm_type: float) -> ClipMode:
        mode = self._modes.get((name, norm_type))
        if mode is None or mode.threshold != threshold:
            mode = build(name, threshold=threshold, norm_type=norm_type)
            self._modes[name, norm_type] = mode
        return mode

    def _judge(self, norm: Number) -> bool | Tensor:
        """Return whether the gradient is finite, and note whether the step is taken.

        The answer stays on an accelerator where a fused optimizer can skip the step there.
        """
        if isinstance(norm, Tensor):
            finite = torch.isfinite(norm)
            if self._fused and self.loss_scale is None and self.nonfinite == "skip":
                self._finite = finite
                return finite
            known = bool(finite)
        else:
            known = math.isfinite(norm)
        if not known and self.loss_scale is None and self.nonfinite == "error":
            advice = "clip.nonfinite=skip leaves such steps out"
            found = finding(self.layout, self.powers, float(norm))
            raise NonFiniteGradient(found, advice, float(norm))
        self._finite = known or (self.nonfinite == "ignore" and self.loss_scale is None)
        return known
