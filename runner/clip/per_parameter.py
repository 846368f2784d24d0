"""Modes ``per_parameter`` and ``adagc``, which scale tensors one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, FactorMode, Norms
from runner.config.modes import AdaGC, PerParameter
from runner.gradients import Layout, transfer
from runner.gradients.norms import by_parameter, is_finite, norms_over_ranks, powers_of


@dataclass(frozen=True, slots=True)
class TensorNorms:
    """The norm of each parameter's gradient, the same bits on every rank."""

    norms: Tensor
    present: Tensor
    norm_type: float

    @property
    def total(self) -> Tensor:
        """‖G‖."""
        if not self.norms.numel():
            return self.norms.sum()
        whole: Tensor = torch.linalg.vector_norm(self.norms, self.norm_type)
        return whole

    def scaled(self, scales: Tensor) -> TensorNorms:
        """Return the norms of gradients that were multiplied by one factor, or by one for each."""
        return replace(self, norms=self.norms * scales)


class TensorMode(FactorMode):
    """A mode that decides by the norms of tensors, from which the norm after clipping follows."""

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> Norms:
        p = self.norm_type
        shards, gradients = layout.gradients()
        _, shares = powers_of(layout, shards, gradients, p, each=True)
        assert shares is not None
        of_parameters = by_parameter(layout, shards, shares, p)
        presence = by_parameter(layout, shards, torch.ones_like(shares), p)
        sizes, present = norms_over_ranks(layout, torch.stack([of_parameters, presence]), p)
        tensors = TensorNorms(sizes, present > 0, p)
        return Norms(tensors.total, is_finite(tensors.total), p, shards, shares, tensors)

    @property
    def reads(self) -> Literal["tensors"]:
        return "tensors"

    def tensors(self, layout: Layout, norms: Norms) -> TensorNorms:
        """Return the norms that ``norms`` have; measure them if another mode made ``norms``."""
        work = norms.work
        if isinstance(work, TensorNorms) and work.norm_type == self.norm_type:
            return work
        tensors: TensorNorms = self.measure(layout).work
        return tensors


def decide_on_tensors(
    mode: ClipMode,
    layout: Layout,
    norms: tuple[Tensor, Tensor],
    compared: tuple[Tensor, Tensor, Tensor],
    threshold: Tensor | float,
    **more: Any,
) -> Decision:
    """Decide to limit some tensors; ``norms`` are ‖G‖ before and after.

    ``compared`` are the values of tensors or blocks that are compared with λ, which of them are
    above it, and which have a gradient.
    """
    values, over, present = compared
    if mode.tally is not None and layout.counts_common:
        mode.tally.add(values.where(present, math.nan), 1.0)
    total = present.sum(dtype=transfer.widest(over.device))
    norm, norm_clipped = norms
    return Decision.of_parts(
        norm=norm,
        after=norm_clipped,
        parts_clipped=over.sum() / total.clamp(min=1.0),
        largest=values.amax() if values.numel() else layout.number(0.0),
        limit=threshold,
        total=total,
        **more,
    )


@dataclass(eq=False)
class PerParameterClip(PerParameter, TensorMode):
    """Limit the norm of each tensor, or block of tensors: ``g_p ← g_p · min(1, λ/‖g_p‖)``."""

    _layout: Layout | None = field(default=None, init=False, repr=False)
    _block: Tensor | None = field(default=None, init=False, repr=False)
    _blocks: int = field(default=0, init=False, repr=False)

    def waits_for(self) -> str:
        if self.by == "block":
            return "with clip.by=block needs all gradients of a block; use clip.by=tensor"
        return super().waits_for()

    def bind(self, layout: Layout) -> None:
        self._layout = layout
        self._block = None
        if self.by == "block":
            numbers: dict[str, int] = {}
            of_names = [numbers.setdefault(block_of(name), len(numbers)) for name in layout.names]
            self._block = transfer.on_device(of_names, layout.device).long()
            self._blocks = len(numbers)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        if self._layout is not layout:
            self.bind(layout)
        limit = self.limit
        tensors = self.tensors(layout, norms)
        sizes, present = self._parts(tensors)
        over = sizes > limit
        scales = torch.where(over, limit / sizes, 1.0)
        if self._block is not None:
            scales = scales[self._block]
        return decide_on_tensors(
            self,
            layout,
            norms=(norms.total, tensors.scaled(scales).total),
            compared=(sizes, over, present),
            threshold=limit,
            scales=scales,
        )

    def _parts(self, tensors: TensorNorms) -> tuple[Tensor, Tensor]:
        """Return the norm of each tensor or block, and whether it has a gradient."""
        if self._block is None:
            return tensors.norms, tensors.present
        p = tensors.norm_type
        zeros = tensors.norms.new_zeros(self._blocks)
        present = zeros.index_add(0, self._block, tensors.present.to(zeros.dtype)) > 0
        if math.isinf(p):
            return zeros.scatter_reduce(0, self._block, tensors.norms, "amax"), present
        return zeros.index_add(0, self._block, tensors.norms**p) ** (1.0 / p), present


def block_of(name: str) -> str:
    """Return the block of a parameter: its name up to the first number, or its module's name."""
    parts = name.split(".")[:-1]
    end = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:end])


@dataclass(eq=False)
class AdaGCClip(AdaGC, TensorMode):
    """Limit the norm of each tensor to λ times its running mean γ_p.

    Wang et al. 2025 (AdaGC, arXiv 2502.11034, algorithm 1), where G is the whole gradient and g_p
    the gradient of the parameter p::

        t < T:  h = min(1, λ_abs/‖G‖)          γ_p ← min(γ_p, ‖h·g_p‖)
        t ≥ T:  h_p = min(1, λ·γ_p/‖g_p‖)      γ_p ← β·γ_p + (1−β)·‖h_p·g_p‖

    A step whose gradient is zero, or absent, leaves γ_p as it is: with the published rule a zero in
    the warm-up makes h_p 0 for ever. A parameter that gets its first gradient after the warm-up is
    not clipped in that step, which begins its γ_p. In the memory ``gamma`` [parameters] is
    infinite before a gradient.
    """

    limit_moves = True  # the warm-up has no λ
    _names: Sequence[str] = field(default=(), init=False, repr=False)
    _layout: Layout | None = field(default=None, init=False, repr=False)
    # Positions in the memory of the parameters of a part; None for the whole model
    _positions: Tensor | None = field(default=None, init=False, repr=False)
    _warm: bool = field(default=True, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        memory = self.memory
        device = layout.device
        wide = transfer.widest(device)
        memory["step"] = torch.as_tensor(memory.get("step", 0.0)).to(device, wide)
        before = torch.as_tensor(memory.get("gamma", ())).to(device, wide)
        # A name that is new takes the value behind the others.
        padded = torch.cat([before, before.new_full((1,), math.inf)])
        memory["gamma"] = padded[self._positions_of(layout, len(before))]
        self._layout = layout
        self._names = layout.names

    def _positions_of(self, layout: Layout, new: int) -> Tensor:
        """Return the positions of the parameters of ``layout`` in the memory."""
        by_name = {name: i for i, name in enumerate(self._names)}
        positions = [by_name.get(name, new) for name in layout.names]
        return transfer.on_device(positions, layout.device).long()

    @torch.no_grad()
    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        if self._layout is not layout:
            self.bind(layout)
        tensors = self.tensors(layout, norms)
        sizes = tensors.norms
        present = tensors.present
        whole = norms.total
        warm = self.memory["step"] < self.warmup_steps
        gamma = self._gamma()
        bound = self.limit * gamma
        over = torch.where(warm, whole > self.absolute, sizes > bound) & present
        factors = torch.where(warm, self.absolute / whole, bound / sizes)
        scales = torch.where(over, factors, 1.0)
        after = tensors.scaled(scales)
        entering = after.norms if self.history == "clipped" else sizes
        self._remember(gamma, entering, moves=sizes > 0, warm=warm)
        return decide_on_tensors(
            self,
            layout,
            norms=(norms.total, after.total),
            compared=(torch.where(warm, math.nan, sizes / gamma), over, present),
            threshold=torch.where(warm, math.nan, layout.number(self.limit)),
            scales=scales,
        )

    def _gamma(self) -> Tensor:
        """Return the running mean of each tensor's norm, inf where there is none yet."""
        gamma: Tensor = self.memory["gamma"]
        return gamma if self._positions is None else gamma[self._positions]

    def _remember(self, gamma: Tensor, entering: Tensor, moves: Tensor, warm: Tensor) -> None:
        """Let norms enter the running means where these move; in the warm-up the smallest stays."""
        running = self.beta * gamma + (1 - self.beta) * entering
        mean = torch.where(gamma.isfinite(), running, entering)
        updated = torch.where(warm, gamma.minimum(entering), mean)
        updated = torch.where(moves, updated, gamma)
        if self._positions is None:
            self.memory["gamma"] = updated
            self.end_parts()
        else:
            self.memory["gamma"] = self.memory["gamma"].index_copy(0, self._positions, updated)

    def of_part(self, layout: Layout) -> AdaGCClip:
        part = copy.copy(self)
        part._layout = layout
        part._positions = self._positions_of(layout, 0)
        return part

    def ready_for_parts(self) -> bool:
        """Return whether the warm-up is over, in which ‖G‖ decides; it waits for an accelerator."""
        if self._warm:
            self._warm = bool(self.memory["step"] < self.warmup_steps)
        return not self._warm

    def end_parts(self) -> None:
        self.memory["step"] = self.memory["step"] + 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"names": list(self._names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._names = state["names"]
        self._warm = True
        if self._layout is not None:
            self.bind(self._layout)
