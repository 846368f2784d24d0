"""The boosted optimizer: it unscales, measures, clips and steps, in this order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.booster.in_backward import InBackward, refused_in_backward, why_not_in_parts
from runner.booster.optimizers import BoostedGroups, match_strides, step_where
from runner.booster.plugin.base import Plugin
from runner.booster.step_order import (
    LossScale,
    Nonfinite,
    NonFiniteGradient,
    StepOrder,
    StepOrderError,
    StepState,
    finding,
)
from runner.clip import ClipMode, Decision, FactorMode, build
from runner.clip.call_history import CallHistory
from runner.clip.groups import ParameterGroups, by_parameter_groups, require_own_clips
from runner.clip.skip import SkipRule
from runner.clip.update_norm import UpdateNorm
from runner.config.clip_section import LIMITS_UPDATES
from runner.gradients import total_norm, transfer
from runner.gradients.norms import FALSE, Norms, is_finite
from runner.parallel.distribution import ParallelModel
from runner.parallel.gradient_sync import nothing


class OptimizerWrapper(StepOrder):
    """One or several optimizers that step together: one norm, one decision, one clipping.

    Attributes:
        decision: what :meth:`clip` decided last, and :meth:`step` completed; None without clipping.
        norms: what :meth:`clip` measured last; None without clipping.
    """

    _finite: bool | Tensor | None  # whether to take the step; None while unknown
    _spike: Tensor | None  # whether a rule leaves out the step
    _coef: Tensor | None  # what the step multiplies gradients by

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        made: ParallelModel,
        plugin: Plugin,
        loss_scale: LossScale | None = None,
        nonfinite: Nonfinite = "skip",
        skip: SkipRule | None = None,
        require_final: Callable[[], None] = nothing,
    ) -> None:
        self.in_backward: InBackward | None = None
        super().__init__(made, loss_scale)
        self.optimizers = list(optimizers)
        self.nonfinite = nonfinite
        self.skip = skip
        self._notes_loss = skip is not None and "loss" in skip.compares
        self._update: UpdateNorm | None = None  # where a rule compares it
        self.compared: dict[str, Tensor] = {}  # what the rule has compared in the last step
        self._plugin = plugin
        self._max_norm = plugin.max_norm
        self._require_final = require_final
        self.decision: Decision | None = None
        self.norms: Norms | None = None
        self.calls = CallHistory()  # of ``apply_gradient_clipping``
        self._mode: ClipMode | None = None  # of the decision
        self._clipper: ClipMode | ParameterGroups | None = None  # by this mode
        self._taken: bool | Callable[[], float] = False
        self._groups = BoostedGroups(self.optimizers, made.layout, made.steps)
        self._fused = self._all_fused()
        if skip is not None and "update" in skip.compares:
            self._update = UpdateNorm(self.optimizers, made.layout)

    def _all_fused(self) -> bool:
        # Ranks may step different parameters by different kernels; all of them decide alike.
        fused = all(group.get("fused") for group in self.param_groups)
        [unfused] = self.layout.totals([self.layout.number(not fused)])
        return not unfused

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def unwrap(self) -> Optimizer:
        """Return the user's optimizer, if there is one alone."""
        count = len(self.optimizers)
        if count > 1:
            raise RuntimeError(f"{count} optimizers were boosted together: use .optimizers")
        return self.optimizers[0]

    def bind(self, mode: ClipMode) -> None:
        """Bind a clipping mode to the layout and to the optimizers; every rank calls it."""
        require_own_clips(mode, self.layout)
        mode.bind(self.layout)
        mode.bind_optimizers(self.optimizers, self.layout)
        self._clipper_of(mode)

    def _clipper_of(self, mode: ClipMode) -> ClipMode | ParameterGroups:
        """Return what clips by a mode, if parameter groups say something of clipping."""
        if mode is not self._mode or self._clipper is None:
            self._mode = mode
            self._clipper = by_parameter_groups(mode, self.layout)
        return self._clipper

    def clip_in_backward(self, mode: ClipMode, *, step: bool = False, each: bool = False) -> None:
        """Clip each gradient in the backward pass, when it has become final, from now on.

        With ``step`` each parameter is stepped beside its gradient, which is then freed. Call
        :meth:`clip` with the same mode, which then returns what was done, and :meth:`step` as ever.
        """
        watch = self._made.watch_final
        problem = self._why_not_in_backward(mode, step)
        if problem or watch is None:
            raise ValueError(f"clipping in the backward pass: {problem}")
        self.bind(mode)
        self.in_backward = InBackward(self, self.optimizers, mode, step, each)
        watch(self.in_backward.callback())

    def _why_not_in_backward(self, mode: ClipMode, step: bool) -> str:
        if self.in_backward is not None:
            return "they are clipped there already"
        if self._made.watch_final is None:
            return "works with SinglePlugin: elsewhere gradients become final after it"
        problems = refused_in_backward(
            mode,
            step=step,
            nonfinite=self.nonfinite,
            fp16=self.loss_scale is not None,
            skip=self.skip is not None,
        )
        for key, reason in problems:
            return f"{key}: {reason}"
        if step:
            for optimizer in self.optimizers:
                reason = why_not_in_parts(optimizer)
                if reason:
                    return reason
        return ""

    @property
    def steps_in_backward(self) -> bool:
        """Whether backward passes step the parameters."""
        return self.in_backward is not None and self.in_backward.steps

    def _make_final(self) -> None:
        self._require_final()
        if self._groups.have_changed():
            self._fused = self._all_fused()
        super()._make_final()

    def _has_gradients(self) -> bool:
        early = self.in_backward
        return (early is not None and early.began is True) or super()._has_gradients()

    @torch.no_grad()
    def clip(self, mode: ClipMode, fold: bool = False, each: bool = False) -> Decision:
        """Unscale, measure ‖G‖, agree whether it is finite, and clip by ``mode`` in place.

        Every rank decides from the same reduced norm. With ``fold``, :meth:`step` may multiply the
        gradients, which costs less where all optimizers are fused ones of torch; each ``.grad`` is
        clipped after the step then. With ``each``, ``norms`` have the share of each gradient.
        """
        self.begin_clip()
        early = self.in_backward
        clipper = self._clipper_of(mode)
        if early is not None and mode is not early.mode:
            raise ValueError("gradients are clipped in the backward pass: clip by the same mode")
        if early is not None and early.began:
            norms = early.finish()
            self.norms = norms
            self.stage = StepState.CLIPPED
            norms.finite = self._judge(norms.total, norms.finite)
            self.decision = early.decide(norms)
            return self.decision
        if mode.info.needs_optimizer:
            mode.bind_optimizers(self.optimizers, self.layout)
        sum_of_losses = self._start_loss() if self._notes_loss else None
        norms = clipper.measure(self.layout, each)
        self.norms = norms
        self.stage = StepState.CLIPPED
        loss = None if sum_of_losses is None else sum_of_losses()
        if loss is not None and self.nonfinite != "ignore":
            norms.total = torch.where(loss.isfinite(), norms.total, math.nan)
            norms.finite = is_finite(norms.total)
        norms.finite = self._judge(norms.total, norms.finite)
        if self.skip is not None:
            self.compared = {"norm": norms.total}
        if loss is not None:
            self.compared["loss"] = loss
        spike: Tensor | None = None
        if self._update is not None:
            decision, spike = self._apply_unless_spike(mode, norms, fold)
        else:
            if self.skip is not None:
                spike = self._leave_out_spike(self.skip, norms)
            decision = self._apply(clipper, norms, fold)
        norms.work = None  # it may hold gradients
        if spike is not None:
            decision.spike = spike.to(norms.total.dtype)
        self.decision = decision
        return decision

    def _leave_out_spike(self, rule: SkipRule, norms: Norms) -> Tensor:
        """Return whether a rule finds a spike, for which ``norms.finite`` is cleared."""
        spike = rule.is_spike(*(self.compared[name] for name in rule.compares))
        # The host waits where it decides whether the step is taken.
        self._spike = spike.cpu() if isinstance(self._finite, bool) else spike
        norms.finite = norms.finite & ~self._spike
        return spike

    def _apply_unless_spike(
        self, mode: ClipMode, norms: Norms, fold: bool
    ) -> tuple[Decision, Tensor]:
        """Clip, and take the decision back if the update of the clipped gradient is a spike."""
        assert self._update is not None
        assert self.skip is not None
        if mode.info.clips == "updates":
            raise ValueError(f"clip.skip.of=update: {LIMITS_UPDATES}")
        clipper = self._clipper_of(mode)
        memories = [(memory, dict(memory)) for memory in mode.memories()]
        decision = self._apply(clipper, norms, fold)
        update = norms.total * math.nan
        if norms.finite:  # the same on every rank
            update = self._update.measure(self._coef)
        self.compared["update"] = update
        spike = self._leave_out_spike(self.skip, norms)
        if self._spike:
            for memory, before in memories:
                memory.clear()
                memory.update(before)
            decision = self._apply(clipper, norms, fold)
        return decision, spike

    def _start_loss(self) -> Callable[[], Tensor]:
        """Start to sum the loss of the step over all ranks; return a function that waits.

        The sum travels with ‖G‖ where that is of all ranks.
        """
        if self._loss is None:
            raise StepOrderError(
                "clip.skip.of compares the loss, which is not known: run the backward pass by "
                "booster.backward(loss, optimizer)"
            )
        plugin = self._plugin
        # Of the ranks that read the same samples one has the loss.
        part = self._loss / plugin.data_size if plugin.reports_metrics else self._loss * 0.0
        if plugin.world_size == 1:
            return lambda: part
        group = self.layout.group
        if group is not None and group.size() == plugin.world_size:
            return self.layout.send_along(part)
        rows = transfer.start_gather(part.view(1), None)
        return lambda: rows().sum()

    def _unless_spike(self, finite: bool | Tensor) -> bool | Tensor:
        """Return ``finite``, or False for a spike."""
        if self._spike is None:
            return finite
        if isinstance(finite, bool):
            return finite and not self._spike
        return finite & ~self._spike

    def _judge(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Return whether the gradient is finite, and note whether the step is taken."""
        on_device = self._fused and self.loss_scale is None and self.nonfinite == "skip"
        on_device = on_device and self._update is None  # the host decides on an update
        if on_device and not transfer.can_read(norm.device):
            self._finite = finite  # A fused optimizer can skip the step there.
            return finite
        finite = finite.cpu()  # so that nothing has to wait for it again
        is_finite = bool(finite)
        if not is_finite and self.loss_scale is None and self.nonfinite == "error":
            advice = "clip.nonfinite=skip leaves such steps out"
            description = finding(self.layout, self.norms, float(norm))
            raise NonFiniteGradient(description, advice, float(norm))
        self._finite = is_finite or (self.nonfinite == "ignore" and self.loss_scale is None)
        return finite

    def _apply(self, mode: ClipMode | ParameterGroups, norms: Norms, fold: bool) -> Decision:
        """Decide, and apply the decision or leave it to the step where that can."""
        if not (fold and isinstance(mode, FactorMode) and mode.reads == "norm"):
            return mode.clip(self.layout, norms)
        decision = mode.decide(self.layout, norms)
        factor = decision.factor
        if factor is not None and decision.finite is not FALSE and self._groups.fold(factor):
            self._coef = factor
            return decision
        return mode.apply(self.layout, decision)

    def clip_and_step(self, mode: ClipMode) -> Decision:
        """Clip and step, in one pass where that is possible; each ``.grad`` is then clipped."""
        decision = self.clip(mode, fold=True)
        self.step()
        return self.decision or decision

    def step(self, closure: None = None) -> bool:
        """Take the step, unless the gradients are not finite; return whether it was taken.

        True on an accelerator whose fused optimizer decides for itself, see :meth:`was_taken`.
        """
        if closure is not None:
            raise TypeError("step() takes no closure: run the backward passes before clipping")
        finite = self._finish_gradients()
        early = self.in_backward
        stepped = early is not None and early.steps and early.began is True
        if self.stage is not StepState.CLIPPED:
            self.decision = None
        if finite is not False and self._any_fused():
            match_strides(self.layout)
        coef = self._coef
        self.begin_step()
        self.left = True
        self._taken = transfer.read_later(finite) if isinstance(finite, Tensor) else finite
        if finite is False:
            return False
        if not stepped:
            self._take_step(finite, coef)
        # Also after a step that only this rank read to be skipped: others decide on the device.
        self._made.broadcast_params()
        return True

    def _take_step(self, finite: bool | Tensor, coef: Tensor | None) -> None:
        """Step all optimizers; the mode limits their updates where it has decided on these."""
        decision = self.decision
        if decision is None or decision.update is None or self._mode is None:
            step_where(finite, self.optimizers, coef)
            return
        self._mode.before_step(self.layout, decision)
        step_where(finite, self.optimizers, coef)
        self.decision = self._mode.after_step(self.layout, decision)

    def _any_fused(self) -> bool:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group.get("fused"):
                    return True
        return False

    def _finish_gradients(self) -> bool | Tensor:
        """Make the gradients final, within the plugin's limit; return whether to take the step."""
        if self.require_step():
            if self.in_backward is not None:
                self.clip(self.in_backward.mode)
            elif self._max_norm > 0:
                self.clip(build("norm", threshold=self._max_norm), fold=True)
            elif self.skip is not None:
                self.clip(build("none"))
        self.unscale()
        if self._finite is None:
            self._finite = self.loss_scale is None or math.isfinite(total_norm(self.layout))
        if self.loss_scale is not None:
            self.loss_scale.update(bool(self._finite))  # A spike is no overflow.
        return self._unless_spike(self._finite)

    def was_taken(self) -> bool:
        """Return whether the last step was taken; waits for that step where a device decides it."""
        return self._taken if isinstance(self._taken, bool) else bool(self._taken())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters of the model, whatever groups hold."""
        for shard in self.layout.shards:
            if set_to_none:
                shard.param.grad = None
            elif shard.param.grad is not None:
                shard.param.grad.zero_()
        self._made.forget(set_to_none)
        self.begin_step()
        self.left = False

    def begin_step(self) -> None:
        """Begin the next step."""
        super().begin_step()
        self._finite = None
        self._spike = None
        self._coef = None
        if self.in_backward is not None:
            self.in_backward.begin_step()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Limit the norm of the whole gradient; return the norm before. A name of Colossal-AI's."""
        decision = self.clip(build("norm", threshold=max_norm, norm_type=norm_type))
        norm = torch.as_tensor(decision.norm, dtype=torch.float32)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm.item()}", norm=norm.item())
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ±``clip_value``; a name of Colossal-AI's wrapper."""
        self.clip(build("value", threshold=clip_value))

    def get_grad_norm(self) -> float | None:
        """Return the norm before clipping in the last step; a name of Colossal-AI's wrapper."""
        return None if self.decision is None else float(self.decision.norm)

    def rest_of_state(self) -> dict[str, Any]:
        """Return the state that is no optimizer's: loss scale, skip rule, memory of calls."""
        state: dict[str, Any] = {}
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        if self.skip is not None:
            state["skip"] = self.skip.state_dict()
        calls = self.calls.state_dict()
        if calls:
            state["calls"] = calls
        return state

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`rest_of_state` returned."""
        if self.loss_scale is not None and state.get("loss_scale") is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        if self.skip is not None and state.get("skip") is not None:
            self.skip.load_state_dict(state["skip"])
        self.calls.load_state_dict(state.get("calls", {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizers, of what this rank steps, and of the rest."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"optimizer": states, **self.rest_of_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        states = state["optimizer"]
        boosted = len(self.optimizers)
        if len(states) != boosted:
            raise ValueError(
                f"the state is that of {len(states)} optimizers, but {boosted} were boosted"
            )
        for optimizer, of_optimizer in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(of_optimizer)
        self._groups.restore_clips()
        self.load_rest(state)
