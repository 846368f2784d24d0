"""Make a model: on the meta device to check it, and on the ranks of a run.

Where ranks hold parts of the model, only the first one makes its values. The others make it on the
``meta`` device, and then allocate memory that they never write to, which an operating system does
not count. ``boost`` gives each rank its parts of the first rank's values.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.config.section import Target
from runner.parallel.collectives import from_all, is_first
from runner.train.maker import TargetError, maker


def make_on_meta(target: Target) -> nn.Module | None:
    """Make a model on torch's meta device, where it takes no memory and has no values.

    Returns:
        The model; None if it needs values while it is made.

    Raises:
        TargetError: the target makes something else. Other exceptions are the target's own.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = maker(target)()
    except Exception as error:
        if is_about_meta(error):
            return None
        raise
    if not isinstance(model, nn.Module):
        raise TargetError(f"makes a {type(model).__name__}, not a torch.nn.Module")
    return model


def is_about_meta(error: Exception) -> bool:
    """Return whether an exception says that a tensor of the meta device has no values."""
    # item() raises a RuntimeError, numpy() a TypeError.
    return isinstance(error, NotImplementedError) or bool(re.search(r"\bmeta\b", str(error), re.I))


def gradient_bytes_of(target: Target) -> int | None:
    """Return the bytes of the gradients of a model; None if it needs values while it is made."""
    model = make_on_meta(target)
    if model is None:
        return None
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def make_on_first(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, str]:
    """Return a model on the host, and why all ranks made its values; every rank calls this.

    Args:
        make: makes the model by torch's default random generator, on the host.
        seed: seed of that generator.

    Returns:
        The model, whose values are undefined on other ranks than the first. The second value is
        empty then. Otherwise all ranks may hold the values.
    """
    offer: list[Any] = [None]  # of the first rank; None if its model cannot be made
    torch.manual_seed(seed)
    if is_first():
        try:
            with _new_objects() as new_objects:
                model = make()
                reason = _why_not_meta(model, new_objects())
            offer = [(reason, _description(model))]
        finally:
            dist.broadcast_object_list(offer, src=0)
        return model, _first_reason(reason)
    dist.broadcast_object_list(offer, src=0)
    reason, description = offer[0] or ("the first rank could not make it", [])
    empty_model = None
    if not reason:
        empty_model, reason = _without_values(make, description)
    if empty_model is None:
        torch.manual_seed(seed)
        return make(), _first_reason(reason)
    return empty_model, _first_reason(reason)


def _first_reason(reason: str) -> str:
    return next(filter(None, from_all(reason)), "")


def _without_values(
    make: Callable[[], nn.Module], description: list[Any]
) -> tuple[nn.Module | None, str]:
    """Return the model with memory that was never written to; or None, and why it has none."""
    try:
        with _new_objects() as new_objects:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that copying to a meta tensor has no effect
                model = make()
            same = _description(model) == description
            _allocate(model)
            unallocated = [tensor for tensor in _tensors(new_objects()) if tensor.is_meta]
    except Exception as error:
        text = str(error).partition("\n")[0]
        return None, f"on the meta device it raises {type(error).__name__}: {text}"
    if not same:
        return None, "it is another model on the meta device"
    if unallocated:
        return None, "on the meta device it keeps tensors that are no parameters or buffers"
    return model, ""


def _why_not_meta(model: nn.Module, new_objects: list[Any]) -> str:
    """Return why ranks cannot do with the parameters and buffers of this model, or nothing."""
    in_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if any(id(tensor) not in in_model for tensor in _tensors(new_objects)):
        return "it keeps tensors that are no parameters or buffers"
    for name, module in model.named_modules():
        if any(isinstance(value, torch.Generator) for value in vars(module).values()):
            return f"{name or 'it'} keeps a random generator"
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"{name} is a {type(parameter).__name__}"
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"{name} has a hook"
    return _why_not_apart((*model.named_parameters(), *model.named_buffers()))


def _why_not_apart(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return which tensors have no dense memory of their own on the host, or nothing."""
    storages: dict[int, str] = {}
    for name, tensor in named_tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            return f"{name} is not a dense tensor on the host"
        if not tensor.numel():
            continue
        owner = storages.setdefault(tensor.untyped_storage().data_ptr(), name)
        if owner != name:
            return f"{owner} and {name} share memory"
    return ""


def _description(model: nn.Module) -> list[Any]:
    """Return what ranks have to agree on: modules, and names, shapes and ties of tensors."""
    described: list[Any] = [(n, type(m).__qualname__, m.training) for n, m in model.named_modules()]
    first_names: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        first = first_names.setdefault(id(tensor), name)
        form = tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad
        described.append((name, first, *form))
    return described


def _allocate(model: nn.Module) -> None:
    """Give tensors on the meta device memory on the host; tied ones stay tied.

    Tensors that a constructor has made on the host stay as they are.
    """
    allocated: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in allocated:
                new_parameter = nn.Parameter(
                    torch.empty_like(parameter.detach(), device="cpu"), parameter.requires_grad
                )
                vars(new_parameter).update(vars(parameter))  # attributes that a model has set
                allocated[parameter] = new_parameter
            setattr(module, key, allocated[parameter])
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                if buffer not in allocated:
                    allocated[buffer] = torch.empty_like(buffer, device="cpu")
                module._buffers[key] = allocated[buffer]


@contextmanager
def _new_objects() -> Iterator[Callable[[], list[Any]]]:
    """Yield a function that returns the objects that were made since, and that are in use."""

    def new_objects() -> list[Any]:
        gc.collect()
        return gc.get_objects()

    already_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # from now on get_objects() leaves out what exists
    try:
        yield new_objects
    finally:
        if not already_frozen:
            gc.unfreeze()


def _tensors(objects: list[Any]) -> list[Tensor]:
    return [value for value in objects if issubclass(type(value), Tensor)]
