"""Notice changes of a model or of its optimizers after they were boosted.

A plugin distributes the parameters that a model has at boost. Parameters that are replaced, added,
tied or converted later would be neither synchronised nor clipped, without an error. So each
training forward pass compares the parameters with those at boost, and each step the parameter
groups with those of the step before. Freezing and unfreezing parameters between steps is fine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from runner.booster.optimizers import orthogonalized
from runner.booster.plugin import Plugin, SinglePlugin, TorchDDPPlugin
from runner.clip import Layout
from runner.parallel.hooks import computed_with

_DTYPE, _TRAINED = attrgetter("dtype"), attrgetter("requires_grad")

_BEFORE = "change the model before booster.boost, or build and boost it anew"


class BoostedParameters:
    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        renamed: Mapping[str, Mapping[str, str]],
        plugin: Plugin,
    ) -> None:
        self._parts, self._renamed = parts, renamed
        self._converts = isinstance(plugin, SinglePlugin)
        self._freezes = isinstance(plugin, SinglePlugin | TorchDDPPlugin)
        known = {id(p): (name, p) for name, p in self._named()}
        self._ids, self._known = known.keys(), list(known.values())
        self._parameters = [parameter for _, parameter in self._known]
        self._dtypes = list(map(_DTYPE, self._parameters))
        self._trained = list(map(_TRAINED, self._parameters))
        self._forward_checked = False
        self._record_slots()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (prefix + self._renamed.get(prefix, {}).get(name, name), parameter)
            for prefix, part in self._parts.items()
            for name, parameter in part.named_parameters()
        ]

    def _record_slots(self) -> None:
        modules = [m for part in self._parts.values() for m in part.modules()]
        self._dicts: list[dict[str, Any]] = [
            held for module in modules for held in (module._parameters, module._modules)
        ]
        self._owners = [held for held in self._dicts for _ in held]
        self._keys = [key for held in self._dicts for key in held]
        self._held = [value for held in self._dicts for value in held.values()]

    def require_same(self) -> None:
        """Check that the model has the parameters that it had at boost.

        Loops without bytecode: a fraction of a microsecond for each parameter.
        """
        self._forward_checked = True
        if not (
            all(map(is_, map(dict.get, self._owners, self._keys), self._held))
            and sum(map(len, self._dicts)) == len(self._held)
            and list(map(_DTYPE, self._parameters)) == self._dtypes
        ):
            self._compare()

    def _compare(self) -> None:
        values = map(dict.get, self._owners, self._keys)
        if any(isinstance(value, Tensor) and type(value) is Tensor for value in values):
            return  # torch.func.functional_call computes with tensors of its own.
        named = self._named()
        now = {id(parameter) for _, parameter in named}
        unsharded = {id(computed_with(p)) for p in self._parameters} - self._ids
        for (name, p), dtype in zip(self._known, self._dtypes, strict=True):
            if id(p) not in now and id(computed_with(p)) not in now:
                raise ValueError(
                    f"{name} was replaced, removed or tied to another parameter after boost, so "
                    f"its optimizer steps a tensor that the model no longer uses: {_BEFORE}"
                )
            if p.dtype != dtype and not self._converts:
                raise ValueError(f"{name} is {p.dtype}, but was {dtype} at boost: {_BEFORE}")
        for name, p in named:
            if p.requires_grad and id(p) not in self._ids | unsharded:
                raise ValueError(
                    f"{name} was added after boost, so it would be neither synchronised nor "
                    f"clipped: {_BEFORE}"
                )
        self._dtypes = list(map(_DTYPE, self._parameters))
        if not now & unsharded:
            self._record_slots()

    def require_final(self) -> None:
        """Check, once a step, that no gradient belongs to a parameter that was frozen since."""
        if not self._forward_checked:
            self.require_same()
        self._forward_checked = False
        trained = list(map(_TRAINED, self._parameters))
        if trained == self._trained:
            return
        for (name, p), was in zip(self._known, self._trained, strict=True):
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

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]

    def _now(self) -> tuple[int, list[int]]:
        groups = [group["params"] for group in self._groups()]
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
            "boosted model",
            "Boost the model that owns it, and add parameters that the boosted model has now: "
            "model.unwrap().named_parameters()",
        )
        for group in self._groups() if self._steps is not None else ():
            group["params"] = [p for p in group["params"] if id(p) in (self._steps or ())]
        for parameter in orthogonalized(self._optimizers):
            if (shard := shards[id(parameter)]).scaled:
                raise ValueError(
                    f"{shard.name} was given to Muon after boost, and clipping would scale it: "
                    "give Muon all of its matrices before booster.boost"
                )
        self._seen = self._now()
        return True


def require_known(
    optimizers: Sequence[Optimizer], known: Collection[int], owner: str, instead: str
) -> None:
    """Refuse a parameter that would be neither synchronised nor clipped; ``known``: ids."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise ValueError(
                        f"param_groups[{number}]['params'][{place}] of {type(optimizer).__name__}, "
                        f"of shape {list(parameter.shape)}, is no parameter of the {owner}: it "
                        f"would be neither synchronised nor clipped. {instead}"
                    )
