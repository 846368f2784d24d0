"""The order in which a forward pass reaches the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from runner.booster import ModelWrapper
from runner.clip import Layout

Position = tuple[int, int, int]
"""Pipeline stage of a parameter, when its module is first called, and its place in the model."""


class ForwardOrder:
    """Records the order in which the modules that hold parameters are called.

    Hooks record it between :meth:`start` and :meth:`stop`. Modules that are not called keep the
    place that they have in the model, after the module before them. So does every module of a model
    compiled by ``torch.compile``: hooks would be compiled into it.

    Args:
        layout: names of the parameters on this rank.
        roots: the modules to watch: the model, and the criterion if it has parameters.
        stages: modules of each pipeline stage on this rank, by number; empty without stages.

    Attributes:
        hooks: those that record now; none while nothing is recorded.
    """

    def __init__(
        self, layout: Layout, roots: Sequence[nn.Module], stages: Mapping[int, nn.Module]
    ) -> None:
        names = {id(shard.param): shard.name for shard in layout.shards}
        # By module: a sharded module computes with other parameter objects than it holds now.
        self._owners = [
            (module, [names[id(p)] for p in module._parameters.values() if id(p) in names])
            for root in roots
            for module in root.modules()
        ]
        self._stage = {module: number for number in stages for module in stages[number].modules()}
        self._compiled = any(module._compiled_call_impl is not None for module, _ in self._owners)
        self._called: dict[nn.Module, int] = {}
        self.hooks: list[RemovableHandle] = []

    @classmethod
    def of(cls, model: ModelWrapper, criterion: object, layout: Layout) -> ForwardOrder:
        """Return the order of a boosted model, and of a criterion that is a module.

        Args:
            model: the boosted model.
            criterion: the loss function; its parameters come last.
            layout: names of the parameters on this rank.
        """
        roots = [model.unwrap()]
        stages: dict[int, nn.Module] = {}
        if model.pipeline is not None:
            stages |= model.pipeline.stages
        if isinstance(criterion, nn.Module):
            roots.append(criterion)
            if model.pipeline is not None:
                stages[model.pipeline.count] = criterion
        return cls(layout, roots, stages)

    def start(self) -> None:
        """Record the modules that are called from now on, unless that was done before."""
        if not self._compiled and not self._called:
            owners = [module for module, names in self._owners if names]
            self.hooks = [module.register_forward_pre_hook(self._note) for module in owners]

    def stop(self) -> None:
        """Record no modules any more."""
        while self.hooks:
            self.hooks.pop().remove()

    def positions(self) -> dict[str, Position]:
        """Return the position of each parameter on this rank, to be compared with those of others.

        A parameter that several modules use has the position of the first one.
        """
        found: dict[str, Position] = {}
        called = -1
        for place, (module, names) in enumerate(self._owners):
            called = self._called.get(module, called)
            for name in names:
                at = self._stage.get(module, 0), called, place
                found[name] = min(at, found.get(name, at))
        return found

    def _note(self, module: nn.Module, inputs: object) -> None:
        self._called.setdefault(module, len(self._called))


def in_order(positions: Iterable[Mapping[str, Position]]) -> list[str]:
    """Return the names of all parameters of a model in the order of its forward pass.

    Args:
        positions: result of :meth:`ForwardOrder.positions` on each rank.
    """
    first: dict[str, Position] = {}
    for rank in positions:
        for name, at in rank.items():
            first[name] = min(at, first.get(name, at))
    return sorted(first, key=lambda name: first[name])
