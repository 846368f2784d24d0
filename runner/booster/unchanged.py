"""Notice changes of a model or of its optimizers after they were boosted.

A plugin distributes the parameters that a model has at boost. Parameters that are replaced, added,
tied or converted later would be neither synchronised nor clipped, without an error. So each
training forward pass compares the parameters with those at boost, and each step the parameter
groups with those of the step before. Freezing and unfreezing parameters between steps is fine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runner.booster.optimizers import orthogonalized
from runner.booster.plugin import Plugin, SinglePlugin, TorchDDPPlugin
from runner.clip import Layout
from runner.parallel.hooks import computed_with

_DTYPE, _TRAINED = attrgetter("dtype"), attrgetter("requires_grad")

_BEFORE = "change the model before booster.boost, or build and boost it anew"


class BoostedParameters:
    """The parameters that a model had when it was boosted."""

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        renamed: Mapping[str, Mapping[str, str]],
        plugin: Plugin,
    ) -> None:
        self._parts, self._renamed = parts, renamed
        self._converts = isinstance(plugin, SinglePlugin)
        self._freezes = isinstance(plugin, SinglePlugin | TorchDDPPlugin)
        self._known = {id(p): (name, p) for name, p in self._named()}
        self._parameters = [parameter for _, parameter in self._known.values()]
        # Ranks may step two parameters of one storage apart.
        plain = [p for p in self._parameters if not isinstance(p, DTensor)]
        self._plain = [] if self._freezes else plain
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
        self._storages = list(map(Tensor.data_ptr, self._plain))

    def require_same(self) -> None:
        """Check that the model has the parameters that it had at boost.

        Loops without bytecode: a fraction of a microsecond for each parameter.
        """
        self._forward_checked = True
        if not (
            all(map(is_, map(dict.get, self._owners, self._keys), self._held))
            and sum(map(len, self._dicts)) == len(self._held)
            and list(map(_DTYPE, self._parameters)) == self._dtypes
            and list(map(Tensor.data_ptr, self._plain)) == self._storages
        ):
            self._compare()

    def _compare(self) -> None:
        values = map(dict.get, self._owners, self._keys)
        if any(isinstance(value, Tensor) and type(value) is Tensor for value in values):
            return  # torch.func.functional_call computes with tensors of its own.
        named = self._named()
        now = {id(parameter) for _, parameter in named}
        unsharded = {id(computed_with(p)) for _, p in self._known.values()} - self._known.keys()
        for name, p in self._known.values():
            if id(p) not in now and id(computed_with(p)) not in now:
                raise ValueError(
                    f"{name} was replaced, removed or tied to another parameter after boost, so "
                    f"its optimizer steps a tensor that the model no longer uses: {_BEFORE}"
                )
        for name, p in named:
            if p.requires_grad and id(p) not in self._known and id(p) not in unsharded:
                raise ValueError(
                    f"{name} was added after boost, so it would be neither synchronised nor "
                    f"clipped: {_BEFORE}"
                )
        before = zip(self._known.values(), self._dtypes, strict=True)
        for (name, p), dtype in before if not self._converts else ():
            if p.dtype != dtype:
                raise ValueError(
                    f"{name} is {p.dtype}, but was {dtype} at boost: convert the model before "
                    "booster.boost"
                )
        self._dtypes = list(map(_DTYPE, self._parameters))
        first: dict[int, str] = {}
        for pointer, p in zip(map(Tensor.data_ptr, self._plain), self._plain, strict=True):
            if pointer and first.setdefault(pointer, self._known[id(p)][0]) != (
                name := self._known[id(p)][0]
            ):
                raise ValueError(
                    f"{name} was given the storage of {first[pointer]}: to tie two parameters, "
                    f"let both modules hold one parameter; {_BEFORE}"
                )
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
        before = zip(self._known.values(), self._trained, strict=True)
        for (name, p), was in before if not self._freezes else ():
            if was and not p.requires_grad and p.grad is not None:
                raise ValueError(
                    f"{name} was frozen while it has a gradient: freeze it after "
                    "optimizer.zero_grad() and before the next forward pass"
                )
        self._trained = trained


class BoostedGroups:
    """The parameter groups of the optimizers that step together."""

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
        now = self._now()
        if now == self._seen:
            return False
        shards = {id(shard.param): shard for shard in self._layout.shards}
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in shards:
                        raise ValueError(
                            f"param_groups[{number}]['params'][{place}] of "
                            f"{type(optimizer).__name__}, of shape {list(parameter.shape)}, is no "
                            "parameter of the boosted model: it would be neither synchronised nor "
                            "clipped. Boost the model that owns it, and add parameters that the "
                            "boosted model has now: model.unwrap().named_parameters()"
                        )
                if self._steps is not None:
                    group["params"] = [p for p in group["params"] if id(p) in self._steps]
        for parameter in orthogonalized(self._optimizers):
            if (shard := shards[id(parameter)]).scaled:
                raise ValueError(
                    f"{shard.name} was given to Muon after boost, and clipping would scale it: "
                    "give Muon all of its matrices before booster.boost"
                )
        self._seen = self._now()
        return True
