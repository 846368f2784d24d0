"""Gradient hooks on parameters that a plugin replaces, and which parameters took part in the loss.

``fully_shard`` reduces zeros for unused parameters, by which the optimizer would change what no
rank used, by momentum and weight decay: :class:`Usage` sets them back to None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from runner.config.notation import first_few
from runner.gradients.shard import local
from runner.parallel.collectives import full, on_any_rank, sharded

# Hooks of one parameter. The handle of a hook removes it from this mapping.
Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
# The unsharded parameter that a forward pass computes with, by the shard on this rank.
_UNSHARDED: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()


def require_no_post_accumulate(named: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Refuse hooks of ``register_post_accumulate_grad_hook``."""
    names = [name for name, parameter in named if parameter._post_accumulate_grad_hooks]
    if names:
        raise ValueError(
            f"{first_few(names)}: a hook of register_post_accumulate_grad_hook cannot "
            f"run here, because {why}: use register_hook, which is carried over, or plugin=ddp"
        )


class AfterBatch:
    """Runs hooks of ``register_post_accumulate_grad_hook`` once after a batch of a pipeline.

    Autograd would run them after each microbatch, on a part of the gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._hooks: dict[nn.Parameter, Mapping[int, Callable[[Tensor], None]]] = {}
        self._accumulated: set[int] = set()
        for parameter in self._parameters:
            if parameter._post_accumulate_grad_hooks:
                # The handle of a hook removes it from this mapping.
                self._hooks[parameter] = parameter._post_accumulate_grad_hooks
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                register(self._note, parameter, after=True)
        self.runs_hooks = bool(self._hooks)

    def _note(self, parameter: Tensor) -> None:
        self._accumulated.add(id(parameter))

    def begin(self) -> None:
        """Count the hooks at the end of boost."""
        self._counts = [len(p._post_accumulate_grad_hooks or ()) for p in self._parameters]

    def has_more(self) -> bool:
        """Return whether a hook was registered after boost: autograd runs it too often."""
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in self._parameters]
        return hooks != self._counts

    @torch.no_grad()
    def run(self) -> None:
        """Run the hooks of the parameters whose gradients the batch has changed."""
        for parameter, hooks in self._hooks.items():
            if id(parameter) in self._accumulated:
                for hook in list(hooks.values()):
                    hook(parameter)
        self._accumulated.clear()


def carry_over(hooks: Hooks | None, replacement: nn.Parameter) -> None:
    """Register ``_backward_hooks`` on a replacement; on a DTensor they get the whole gradient."""
    if not hooks:
        return

    @torch.no_grad()
    def run(gradient: Tensor) -> Tensor:
        whole = full(gradient)
        for hook in list(hooks.values()):
            changed = hook(whole)
            whole = whole if changed is None else full(changed)  # by tensor parallelism, under fsdp
        if isinstance(replacement, DTensor):
            return sharded(whole, replacement.device_mesh, replacement.placements)
        return whole

    register(run, replacement)


class Apart:
    """Copies a gradient that shares memory: microbatches would be added to both of them."""

    def __init__(self) -> None:
        self.seen: dict[int, StorageWeakRef] = {}

    def __call__(self, gradient: Tensor) -> Tensor | None:
        storage = local(gradient).untyped_storage()
        earlier = self.seen.get(storage._cdata)
        if earlier is not None and not earlier.expired():  # type: ignore[no-untyped-call]
            return gradient.clone()
        self.seen[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return None


def register(hook: Callable[[Tensor], Any], parameter: Tensor, after: bool = False) -> None:
    """Register a gradient hook, or one ``after`` accumulation, on a parameter, frozen or not."""
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return  # quantized weights have no gradient
    required = parameter.requires_grad
    when = "register_post_accumulate_grad_hook" if after else "register_hook"
    getattr(parameter.requires_grad_(), when)(hook)
    parameter.requires_grad_(required)


def computed_with(parameter: Tensor) -> Tensor:
    """Return the tensor whose gradient autograd computes: of a shard, the unsharded parameter."""
    return _UNSHARDED.get(parameter, parameter)


def held_tensors(value: Any, seen: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Yield the tensors in outputs of any structure, in the attributes of objects too."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, type | nn.Module):
        inside = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        if is_dataclass(value) and not inside:  # it has slots
            inside = {field.name: getattr(value, field.name) for field in fields(value)}
        for part in value if isinstance(value, tuple | list | set) else inside.values():
            yield from held_tensors(part, (*seen, id(value)))


class Usage:
    """Records which parameters get a gradient on this rank between two optimizer steps."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._kept: dict[int, ReferenceType[Tensor]] = {}
        self._apart = Apart()
        self._whole: list[Tensor] = []
        self._fsdp_params: list[Any] = []  # where torch accumulates in another dtype

    def watch(self, root: nn.Module, hooks: Mapping[tuple[nn.Module, str], Hooks]) -> None:
        """Record the use of the parameters of ``root``, and run the user's hooks on them.

        It unshards each block, whose gradients autograd computes; every rank calls it.
        """
        seen: set[nn.Parameter] = set()
        # Innermost first: a block gathers the parameters that are not in blocks inside it.
        for block in reversed(list(root.modules())):
            if not isinstance(block, FSDPModule):
                continue
            slots = {
                parameter: (module, key)
                for module in block.modules()
                for key, parameter in module._parameters.items()
                if parameter is not None and parameter not in seen
            }
            seen.update(slots)
            block.unshard()
            for shard, (module, key) in slots.items():
                gathered = module._parameters[key]
                assert gathered is not None
                _UNSHARDED[shard] = gathered
                self._whole.append(gathered)
                carry_over(hooks.get((module, key)), gathered)
                # Not after accumulation: zero-bubble schedules call autograd.grad.
                register(self._noting(id(shard)), gathered)
            block.reshard()
            for group in block._get_fsdp_state()._fsdp_param_groups:
                self._fsdp_params += group.fsdp_params

    def forget(self, set_to_none: bool) -> None:
        """Forget a window that ``zero_grad`` drops, and what ``no_sync`` has kept whole."""
        for gathered in self._whole:
            gathered.grad = None
        for fsdp_param in self._fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
        if set_to_none:
            self._used.clear()
        self._apart.seen.clear()

    def _noting(self, parameter: int) -> Callable[[Tensor], Tensor | None]:
        """Return a hook that notes the use of a parameter, given its id."""

        def note(gradient: Tensor) -> Tensor | None:
            self._used.add(parameter)
            return self._apart(gradient)

        return note

    @torch.no_grad()
    def drop_unused(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """Set gradients of parameters that no rank used to None, unless they are older ones."""
        if not parameters:
            return
        _require_no_lost_gradients(parameters)
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
        self._apart.seen.clear()


def _require_no_lost_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks and gradients on shards, or on gathered copies, that a step would not see."""
    for name, parameter in parameters.items():
        if parameter._backward_hooks:
            raise ValueError(
                f"{name}: a hook was registered after boost, on a shard that no backward pass "
                "reaches: register it on the model before boost, which carries it over"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name}: a hook of register_post_accumulate_grad_hook was registered after "
                "boost, and runs on a shard of the gradient: register one of register_hook on the "
                "model before boost, or choose plugin=ddp"
            )
        whole = computed_with(parameter)
        if whole is not parameter and whole.grad is not None:
            raise ValueError(
                f"{name}: a gradient was assigned to the copy that a forward pass gathers, "
                "and would be lost: run loss.backward(), or choose plugin=ddp"
            )


def watch_parameters(model: nn.Module, final: Callable[[Tensor], None]) -> None:
    """Call ``final`` with each parameter of a model that is whole in this process.

    A gradient whose memory is another's too, or is still needed, is copied before it is changed.
    """
    usual: list[int] = []  # of a gradient that shares its memory with no other
    single = nn.Parameter(torch.ones(2))
    register(lambda p: usual.append(storage_uses(p.grad)), single, after=True)
    with torch.enable_grad():
        (single * 2.0).sum().backward()  # type: ignore[no-untyped-call]

    def note(parameter: Tensor) -> None:
        gradient = parameter.grad
        strided = gradient is not None and gradient.layout is torch.strided
        if strided and storage_uses(gradient) > usual[0]:
            parameter.grad = gradient.clone()  # type: ignore[union-attr]
        del gradient
        final(parameter)

    for parameter in model.parameters():
        register(note, parameter, after=True)


def storage_uses(tensor: Any) -> int:
    """Return how many tensors share the memory of ``tensor``, itself and passing ones included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
