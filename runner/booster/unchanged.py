"""Notice changes of a model or of its optimizers after they were boosted.

A plugin distributes the parameters that a model has at boost. Parameters that are replaced, added,
tied or converted later would be neither synchronised nor clipped, without an error. So each
training forward pass compares the parameters with those at boost, and each step the parameter
groups with those of the step before. Freezing and unfreezing parameters between steps is fine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.booster.optimizers import orthogonalized
from runner.booster.plugin import Plugin, SinglePlugin, TorchDDPPlugin
from runner.clip import Layout
from runner.parallel.hooks import computed_with

_BEFORE = "change the model before booster.boost, or build and boost it anew"


class BoostedParameters:
    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        renamed: Mapping[str, str],
        plugin: Plugin,
    ) -> None:
        self._parts, self._renamed = parts, renamed
        self._converts = isinstance(plugin, SinglePlugin)
        self._freezes = isinstance(plugin, SinglePlugin | TorchDDPPlugin)
        self._known = {id(p): (name, p) for name, p in self._named()}
        self._trained = [p.requires_grad for _, p in self._known.values()]
        self._forward_checked = False
        self._record()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (self._renamed.get(prefix + name, prefix + name), parameter)
            for prefix, part in self._parts.items()
            for name, parameter in part.named_parameters()
        ]

    def _record(self) -> None:
        modules = [m for part in self._parts.values() for m in part.modules()]
        self._dicts = [held for m in modules for held in (m._parameters, m._modules)]
        self._slots = [(held, key, value) for held in self._dicts for key, value in held.items()]
        self._dtypes = [(p, p.dtype) for _, p in self._known.values()]

    def require_same(self) -> None:
        """Check that the model has the parameters that it had at boost.

        Looks at dictionaries alone: a fraction of a microsecond for each parameter.
        """
        self._forward_checked = True
        if not (
            all(held.get(key) is value for held, key, value in self._slots)
            and sum(map(len, self._dicts)) == len(self._slots)
            and all(p.dtype is dtype for p, dtype in self._dtypes)
        ):
            self._compare()

    def _compare(self) -> None:
        if any(type(held.get(key)) is Tensor for held, key, _ in self._slots):
            return  # torch.func.functional_call computes with tensors of its own.
        named = self._named()
        now = {id(parameter) for _, parameter in named}
        unsharded = {id(computed_with(p)) for _, p in self._known.values()} - self._known.keys()
        for (name, p), (_, dtype) in zip(self._known.values(), self._dtypes, strict=True):
            if id(p) not in now and id(computed_with(p)) not in now:
                raise ValueError(
                    f"{name} was replaced, removed or tied to another parameter after boost, so "
                    f"its optimizer steps a tensor that the model no longer uses: {_BEFORE}"
                )
            if p.dtype != dtype and not self._converts:
                raise ValueError(f"{name} is {p.dtype}, but was {dtype} at boost: {_BEFORE}")
        for name, p in named:
            if p.requires_grad and id(p) not in self._known.keys() | unsharded:
                raise ValueError(
                    f"{name} was added after boost, so it would be neither synchronised nor "
                    f"clipped: {_BEFORE}"
                )
        if not now & unsharded:
            self._record()

    def require_final(self) -> None:
        """Check, once a step, that no gradient belongs to a parameter that was frozen since."""
        if not self._forward_checked:
            self.require_same()
        self._forward_checked = False
        trained = [p.requires_grad for _, p in self._known.values()]
        if trained == self._trained:
            return
        for (name, p), was in zip(self._known.values(), self._trained, strict=True):
            if was and not p.requires_grad and p.grad is not None and not self._freezes:
                raise ValueError(
                    f"{name} was frozen while it has a gradient: freeze it after "
                    "optimizer.zero_grad() and before the next forward pass"
                )
        self._trained = trained


class BoostedGroups:
    """The parameter groups of the optimizers that step together; ``steps``: ids of this rank."""

    def __init__(
        self, optimizers: Sequence[Optimizer], layout: Layout, steps: frozenset[int] | None
    ) -> None:
        self._optimizers, self._layout, self._steps = optimizers, layout, steps
        self._seen = self._now()

    def _now(self) -> tuple[int, list[int]]:
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        return len(groups), list(map(id, chain.from_iterable(groups)))

    def have_changed(self) -> bool:
        """Return whether parameters were added since the last call, by ``add_param_group``, say.

        With ZeRO stage 1, this rank keeps those of them that it steps.
        """
        if self._now() == self._seen:
            return False
        shards = {id(shard.param): shard for shard in self._layout.shards}
        require_known(
            self._optimizers,
            shards.keys(),
            "Boost the model that owns it, and add parameters that the boosted model has now: "
            "model.unwrap().named_parameters()",
        )
        steps = self._steps
        if steps is not None:
            for group in (group for each in self._optimizers for group in each.param_groups):
                group["params"] = [p for p in group["params"] if id(p) in steps]
        for parameter in orthogonalized(self._optimizers):
            if (shard := shards[id(parameter)]).scaled:
                raise ValueError(
                    f"{shard.name} was given to Muon after boost, and clipping would scale it: "
                    "give Muon all of its matrices before booster.boost"
                )
        self._seen = self._now()
        return True


def require_known(optimizers: Sequence[Optimizer], known: Collection[int], instead: str) -> None:
    """Refuse a parameter that would be neither synchronised nor clipped; ``known``: ids."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(
                        f"param_groups[{number}]['params'][{place}] of {type(optimizer).__name__}, "
                        f"of shape {list(parameter.shape)}, is no parameter of a boosted module: "
                        f"it would be neither synchronised nor clipped. {instead}"
                    )
