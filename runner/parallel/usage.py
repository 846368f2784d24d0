"""Which sharded parameters took part in the loss.

``fully_shard`` reduces the gradients of a block in one collective, to which a rank adds zeros for
what it did not use. A parameter that no rank used would end with a gradient of zeros instead of
None, and momentum and weight decay would move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runner.parallel.hooks import HookError, Hooks, carry_over, register


class Usage:
    """Records which parameters get a gradient on this rank, from one optimizer step to the next."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._kept: dict[int, ReferenceType[Tensor]] = {}

    def watch(self, root: nn.Module, hooks: Mapping[tuple[nn.Module, str], Hooks]) -> None:
        """Record the use of the parameters of ``root``, and run the user's hooks on them.

        Gradients are computed for the gathered parameters. These exist from the first time that a
        block is gathered, so each block is gathered once: every rank has to call it.

        Args:
            root: the model, or a stage of it, sharded.
            hooks: those of the user, by the module that owns the parameter and its key there.
        """
        for block, owned in _owned_by_block(root).items():
            block.unshard()
            for (module, key), sharded in owned:
                gathered = module._parameters[key]
                assert gathered is not None
                if (found := hooks.get((module, key))) is not None:
                    carry_over(found, gathered)
                # Not a post-accumulate hook: zero-bubble schedules call autograd.grad, which runs
                # none.
                register(partial(self._note, id(sharded)), gathered)
            block.reshard()

    def _note(self, parameter: int, gradient: Tensor) -> None:
        self._used.add(parameter)

    @torch.no_grad()
    def drop_unused(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """Set the gradients that are zeros because no rank used the parameter to None.

        A gradient that was there before, because the user zeroed it or let it grow, stays.

        Args:
            parameters: sharded ones by name, in the same order on every rank of the group.
            group: the data-parallel ranks that hold them.

        Raises:
            HookError: a hook was registered on a sharded parameter, where it never runs.
        """
        if not parameters:
            return
        hooked = [name for name, p in parameters.items() if p._backward_hooks]
        if hooked:
            raise HookError(
                f"{hooked[0]}: a hook was registered after boost, on a shard that no backward pass "
                "reaches: register it on the model before boost, which carries it over"
            )
        # On the host, so that no accelerator is waited for.
        used = torch.tensor([id(p) in self._used for p in parameters.values()], dtype=torch.int32)
        if group.size() > 1:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        for parameter, by_any in zip(parameters.values(), used.tolist(), strict=True):
            kept = self._kept.pop(id(parameter), None)
            if parameter.grad is None:
                continue
            if by_any or (kept is not None and kept() is parameter.grad):
                self._kept[id(parameter)] = ref(parameter.grad)
            else:
                parameter.grad = None
        self._used.difference_update(id(p) for p in parameters.values())


def _owned_by_block(
    root: nn.Module,
) -> dict[FSDPModule, list[tuple[tuple[nn.Module, str], nn.Parameter]]]:
    """Each sharded block, with the slots (module, key) of the parameters that it gathers."""
    block_of: dict[nn.Module, FSDPModule] = {}
    for block in root.modules():  # outermost first, so the innermost block counts
        if isinstance(block, FSDPModule):
            block_of.update(dict.fromkeys(block.modules(), block))
    owned: dict[FSDPModule, dict[int, tuple[tuple[nn.Module, str], nn.Parameter]]] = {}
    for module, owner in block_of.items():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owned.setdefault(owner, {}).setdefault(id(parameter), ((module, key), parameter))
    return {block: list(slots.values()) for block, slots in owned.items()}
