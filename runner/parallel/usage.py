"""Record which sharded parameters took part in the loss.

``fully_shard`` reduces the gradients of a block in one collective, in which unused parameters have
zeros. A parameter that no rank used would get a gradient of zeros instead of None, and the
optimizer would change it by momentum and weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from runner.parallel.buckets import on_any_rank
from runner.parallel.experts import split_parameters
from runner.parallel.hooks import Apart, HookError, Hooks, carry_over, register
from runner.parallel.mesh import Axes

_UNSHARDED: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
"""The unsharded parameter that a forward pass computes with, by the shard on this rank."""


def computed_with(parameter: Tensor) -> Tensor:
    """Return the tensor whose gradient autograd computes: of a shard, the unsharded parameter."""
    return _UNSHARDED.get(parameter, parameter)


class Usage:
    """Records which parameters get a gradient on this rank between two optimizer steps.

    Attributes:
        blocks: the sharded parameters of each block, which ``fully_shard`` reduces together.
    """

    def __init__(self) -> None:
        self.blocks: list[list[nn.Parameter]] = []
        self._used: set[int] = set()
        self._kept: dict[int, ReferenceType[Tensor]] = {}
        self._apart = Apart()

    def watch(self, root: nn.Module, hooks: Mapping[tuple[nn.Module, str], Hooks]) -> None:
        """Record the use of the parameters of ``root``, and run the user's hooks on them.

        Autograd computes gradients of the unsharded parameters, which exist after a block was
        unsharded once. So this unshards each block, and every rank has to call it.
        """
        seen: set[int] = set()
        # Innermost first: a block gathers the parameters that are not in blocks inside it.
        for block in reversed(list(root.modules())):
            if not isinstance(block, FSDPModule):
                continue
            slots = {
                id(parameter): (module, key, parameter)
                for module in block.modules()
                for key, parameter in module._parameters.items()
                if parameter is not None and id(parameter) not in seen
            }
            seen.update(slots)
            self.blocks.append([shard for *_, shard in slots.values()])
            block.unshard()
            for sharded, (module, key, shard) in slots.items():
                gathered = module._parameters[key]
                assert gathered is not None
                _UNSHARDED[shard] = gathered
                carry_over(hooks.get((module, key)), gathered)
                # Not a post-accumulate hook: zero-bubble schedules call autograd.grad, which runs
                # none.
                register(partial(self._note, sharded), gathered)
            block.reshard()

    def _note(self, parameter: int, gradient: Tensor) -> Tensor | None:
        self._used.add(parameter)
        return self._apart(gradient)

    def drops(
        self, model: nn.Module, axes: Axes, experts: frozenset[str]
    ) -> list[Callable[[], None]]:
        """Return a call of :meth:`drop_unused` for each group of ranks that hold the same
        shards.
        """
        shared, expert = split_parameters(model, experts)
        return [
            partial(self.drop_unused, shared, axes.dp.get_group()),
            partial(self.drop_unused, expert, axes.edp.get_group()),
        ]

    @torch.no_grad()
    def drop_unused(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """Set gradients of parameters that no rank used to None.

        Gradients that already existed before the backward pass stay.
        """
        if not parameters:
            return
        hooked = [name for name, p in parameters.items() if p._backward_hooks]
        if hooked:
            raise HookError(
                f"{hooked[0]}: a hook was registered after boost, on a shard that no backward pass "
                "reaches: register it on the model before boost, which carries it over"
            )
        used = on_any_rank([id(p) in self._used for p in parameters.values()], group)
        for parameter, by_any in zip(parameters.values(), used, strict=True):
            kept = self._kept.pop(id(parameter), None)
            if parameter.grad is None:
                continue
            if by_any or (kept is not None and kept() is parameter.grad):
                self._kept[id(parameter)] = ref(parameter.grad)
            else:
                parameter.grad = None
        self._used.difference_update(id(p) for p in parameters.values())
        self._apart.forget()
