"""The tensors of boosted models and optimizers by name, for files that fit any layout of ranks.

A name is that in the whole model, whichever rank or stage holds the parameter. The state of an
optimizer for the parameter ``net.weight`` is ``optimizer/0/net.weight/exp_avg`` and the like.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from runner.booster.optimizer import OptimizerWrapper
from runner.booster.wrapper import ModelWrapper
from runner.config.notation import first_few
from runner.parallel.full_state_dict import gathered
from runner.parallel.sharded_files import Source, Stored, fill
from runner.parallel.sharding import reshard

OPTIMIZER = "optimizer/"
"""Prefix of the names of an optimizer's tensors."""

_OF_LAYOUT = ("params", "param_names", "fused", "foreach")
"""Entries of a parameter group that depend on where its parameters lie."""

_RATES = ("initial_lr", "max_lr", "min_lr")
"""Entries that torch's schedulers add for the rate."""


def model_tensors(model: ModelWrapper, with_buffers: bool = True) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers on this rank, by their names in the whole
    model.
    """
    return {name: copies[0] for name, copies in model_slots(model, with_buffers).items()}


def whole_model(model: ModelWrapper) -> dict[str, Tensor]:
    """Gather the state dict of the whole model on the host; every rank has to call this."""
    whole = gathered(model.unwrap(), model.renamed)
    return {name: whole[first] for name, first in model.names.items()} if whole else {}


def load_model(model: ModelWrapper, source: Source, *, missing: bool = False) -> None:
    """Load the parameters and buffers of a model under any layout; every rank has to call this."""
    tensors = model_slots(model)
    if missing:
        tensors = {name: copies for name, copies in tensors.items() if name in source.stored}
    fill(tensors, source)


def model_slots(model: ModelWrapper, with_buffers: bool = True) -> dict[str, list[Tensor]]:
    """Return the tensors of a model by name; a rank with two stages may hold a tied one twice.

    Under fully sharded data parallelism they are the shards: a forward pass, such as that of an
    evaluation, has left whole parameters in their place.
    """
    stages = [] if model.pipeline is None else list(model.pipeline.stages.values())
    reshard([model.unwrap(), *stages])
    module, known = model.unwrap(), set(model.names.values())
    found: dict[str, list[Tensor]] = {}
    for own, tensor in (
        *module.named_parameters(),
        *(module.named_buffers() if with_buffers else ()),
    ):
        name = model.renamed.get(own, own)
        if name in known:
            found.setdefault(name, []).append(tensor)
    return found


def optimizer_tensors(optimizer: OptimizerWrapper) -> dict[str, Tensor]:
    """Return the tensors in the state of the optimizers on this rank."""
    return {
        key: _placed(key, value, parameter)
        for key, value, parameter in _state(optimizer)
        if isinstance(value, Tensor)
    }


def optimizer_values(optimizer: OptimizerWrapper) -> dict[str, Any]:
    """Return all of the optimizers that is no tensor; every rank has to call this."""
    here = {key: value for key, value, _ in _state(optimizer) if not isinstance(value, Tensor)}
    listed = [here]
    if dist.is_initialized() and dist.get_world_size() > 1:
        listed = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(listed, here)
    groups = [
        [
            {key: value for key, value in group.items() if key not in _OF_LAYOUT}
            for group in each.param_groups
        ]
        for each in optimizer.optimizers
    ]
    values = {
        "kinds": _kinds(optimizer),
        "groups": groups,
        "state": {key: value for part in listed for key, value in part.items()},
        "loss_scale": None if optimizer.loss_scale is None else optimizer.loss_scale.state_dict(),
    }
    return values if optimizer.skip is None else values | {"skip": optimizer.skip.state_dict()}


def load_optimizer(optimizer: OptimizerWrapper, source: Source, values: Mapping[str, Any]) -> None:
    """Load the state of the optimizers under any layout; every rank has to call this."""
    tensors, assign = optimizer_slots(optimizer, source.stored, values)
    fill(tensors, source)
    assign()


def optimizer_slots(
    optimizer: OptimizerWrapper,
    held: Mapping[str, Stored],
    values: Mapping[str, Any],
    keep: Collection[str] = (),
) -> tuple[dict[str, list[Tensor]], Callable[[], None]]:
    """Make tensors that the state of the optimizers can be loaded into; nothing is changed."""
    _require_same(optimizer, values)
    kept = {*keep, *(_RATES if "lr" in keep else ())}
    fields: dict[str, list[str]] = {}
    for key in (*held, *values["state"]):
        owner, _, field = key.rpartition("/")
        fields.setdefault(owner, []).append(field)
    tensors: dict[str, list[Tensor]] = {}
    states: list[tuple[Optimizer, nn.Parameter, dict[str, Any]]] = []
    for owner, each, group, parameter in _owners(optimizer):
        state: dict[str, Any] = {}
        for field in fields.get(owner, ()):
            key = f"{owner}/{field}"
            if key in held:
                state[field] = _empty(key, held[key], parameter, group)
                tensors.setdefault(key, []).append(state[field])
            else:
                state[field] = values["state"][key]
        states.append((each, parameter, state))

    def assign() -> None:
        for each, parameter, state in states:
            if state:
                each.state[parameter] = state
        for each, groups in zip(optimizer.optimizers, values["groups"], strict=True):
            for group, settings in zip(each.param_groups, groups, strict=True):
                group.update({key: settings[key] for key in settings.keys() - kept})
        if optimizer.loss_scale is not None and values["loss_scale"] is not None:
            optimizer.loss_scale.load_state_dict(values["loss_scale"])
        if optimizer.skip is not None and "skip" in values:
            optimizer.skip.load_state_dict(values["skip"])

    return tensors, assign


def packed(state: Mapping[str, Any]) -> bytes:
    """Return what ``torch.save`` writes of a state that is loaded without running code in it.

    NumPy's numbers become Python's.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain(state), buffer)
        buffer.seek(0)
        unknown = get_unsafe_globals_in_checkpoint(buffer)
    except Exception as error:  # what pickle raises depends on the object
        unknown = [f"{type(error).__name__}: {error}"]
    if not unknown:
        return buffer.getvalue()
    for key, part in state.items() if len(state) > 1 else ():
        try:
            packed({key: part})
        except ValueError as error:
            raise error from None
    raise ValueError(
        f"{' and '.join(state)} cannot be saved: only tensors, numbers, strings, lists and dicts "
        f"can be loaded without running code, but the state holds {first_few(unknown)}"
    )


def plain(value: Any) -> Any:
    """Return nested dicts and lists with Python's numbers in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {plain(key): plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def _kinds(optimizer: OptimizerWrapper) -> list[str]:
    return [type(each).__name__ for each in optimizer.optimizers]


def _require_same(optimizer: OptimizerWrapper, values: Mapping[str, Any]) -> None:
    """Refuse the state of optimizers of other classes, or with other groups."""
    if (saved := values["kinds"]) != (own := _kinds(optimizer)):
        raise ValueError(f"the state is that of {', '.join(saved)}, not of {', '.join(own)}")
    sizes = [len(groups) for groups in values["groups"]]
    here = [len(each.param_groups) for each in optimizer.optimizers]
    if sizes != here:
        raise ValueError(
            f"the state is that of optimizers with {sizes} parameter groups, but here they have "
            f"{here}"
        )


def _owners(
    optimizer: OptimizerWrapper,
) -> Iterator[tuple[str, Optimizer, dict[str, Any], nn.Parameter]]:
    """Yield each parameter that an optimizer of this rank steps, with the name of its state."""
    names = {id(shard.param): shard.name for shard in optimizer.layout.shards}
    for number, each in enumerate(optimizer.optimizers):
        for group in each.param_groups:
            for parameter in group["params"]:
                yield f"{OPTIMIZER}{number}/{names[id(parameter)]}", each, group, parameter


def _state(optimizer: OptimizerWrapper) -> Iterator[tuple[str, Any, nn.Parameter]]:
    for owner, each, _, parameter in _owners(optimizer):
        # A look at a defaultdict would make an entry.
        for field, value in each.state[parameter].items() if parameter in each.state else ():
            yield f"{owner}/{field}", value, parameter


def _placed(key: str, value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return ``value`` as the DTensor that it is a shard of, if its parameter is one."""
    if isinstance(value, DTensor) or value.ndim == 0 or not isinstance(parameter, DTensor):
        return value
    if value.shape != parameter.to_local().shape:
        raise ValueError(f"{key} has shape {list(value.shape)}, which says not where it belongs")
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _empty(key: str, held: Stored, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """Return a tensor to load a part of the state of ``parameter`` into."""
    if held.shape == tuple(parameter.shape) and held.shape:
        return torch.empty_like(parameter, dtype=held.dtype, requires_grad=False)
    if held.shape and isinstance(parameter, DTensor):
        raise ValueError(f"{key} has shape {list(held.shape)}, which cannot be sharded like it")
    # torch's optimizers count their steps on the host, but for these.
    counts = key.endswith("/step") and not (group.get("fused") or group.get("capturable"))
    device = torch.device("cpu") if counts else parameter.device
    return torch.empty(held.shape, dtype=held.dtype, device=device)
