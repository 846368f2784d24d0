"""Run a model without leaving a trace in it, or in the random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST_COPIED = 2**28  # bytes of frozen parameters; more than a teacher has: the base of adapters


class Trace:
    """What forward passes leave behind: random numbers drawn, buffers, frozen parameters, counts.

    A teacher whose weights follow the model is frozen, and may be changed in a forward pass. A
    count is an attribute that is a number. Flags stay: some say that a hook was registered.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        all_modules = list(modules)
        self._device = device
        self._numbers = [(vars(module), _numbers_of(module)) for module in all_modules]
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor, int]] = [
            (module._buffers, name, buffer, buffer.detach().clone(), buffer._version)
            for module in all_modules
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        self._frozen = _copies_of_frozen(all_modules)
        self._drawn = _generators(device)

    def drawn(self) -> bool:
        """Return whether a random number was drawn since the last call."""
        states = _generators(self._device)
        same = all(torch.equal(a, b) for a, b in zip(states, self._drawn, strict=True))
        self._drawn = states
        return not same

    def remove(self) -> None:
        """Set buffers, frozen parameters and counts to what they were at first."""
        for attributes, before in self._numbers:
            for name in [name for name, value in attributes.items() if type(value) in (int, float)]:
                if name not in before:
                    del attributes[name]  # a count that began in a class attribute
            attributes.update(before)
        with torch.no_grad():
            for owner, name, buffer, before_buffer, version in self._buffers:
                if buffer._version != version:
                    buffer.copy_(before_buffer)
                owner[name] = buffer
            for parameter, copy in self._frozen:
                if not torch.equal(parameter, copy):
                    parameter.copy_(copy)


@contextmanager
def untouched(modules: Iterable[nn.Module], device: torch.device) -> Iterator[Trace]:
    """Leave generators, modes, buffers, frozen parameters and counts of modules as they were."""
    all_modules = list(modules)
    training = [(module, module.training) for module in all_modules]
    trace = Trace(all_modules, device)
    devices = [device] if device.type == "cuda" else []
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices), eager:
            yield trace
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, was_training in training:
            module.training = was_training
        trace.remove()


def _copies_of_frozen(modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Return frozen parameters and copies of them; none if these would take much memory."""
    parameters = {
        id(parameter): parameter
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None and not parameter.requires_grad and not parameter.is_meta
    }
    if sum(parameter.nbytes for parameter in parameters.values()) > _MOST_COPIED:
        return []
    return [(parameter, parameter.detach().clone()) for parameter in parameters.values()]


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    values = vars(module).items()
    return {name: value for name, value in values if type(value) in (int, float)}


def _generators(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a loss may draw from."""
    arrays: Any = np.random.get_state()
    states = [torch.get_rng_state(), torch.from_numpy(arrays[1].astype(np.int64))]
    states.append(torch.tensor([arrays[2], *random.getstate()[1]]))
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
