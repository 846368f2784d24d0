"""Random generators: seeded for a purpose, and those of one process, read and restored together."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_HOLDERS = ("sampler", "batch_sampler", "dataset")
"""Attributes of a loader, and of what it holds, whose generators are looked for."""


def seed_for(purpose: str, seed: int, epoch: int) -> int:
    """Return a seed of 63 bits that depends on a purpose, a seed and an epoch alone."""
    digest = hashlib.blake2b(f"{purpose},{seed},{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(purpose: str, seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator that is the same on every rank and after a restart."""
    return torch.Generator().manual_seed(seed_for(purpose, seed, epoch))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def generators(loader: Any, above: str = "") -> dict[str, Generator]:
    """Return the generators of a data loader, its samplers and its data set, by dotted name."""
    found: dict[str, Generator] = {}
    for name, value in getattr(loader, "__dict__", {}).items():
        if isinstance(value, Generator):
            found[above + name] = value
        elif above.count(".") < 4 and (
            name in _HOLDERS or isinstance(value, DataLoader | Sampler | Dataset)
        ):
            found |= generators(value, f"{above}{name}.")
    return found


class RandomState(NamedTuple):
    """State of the global generators of Python, NumPy and torch, and of the current GPU's."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None = None
    own: Mapping[str, Any] = {}

    @classmethod
    def now(cls, own: Mapping[str, Generator], with_gpu: bool = True) -> RandomState:
        uses_gpu = with_gpu and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            random.getstate(),
            np.random.get_state(legacy=False),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if uses_gpu else None,
            {name: _state_of(generator) for name, generator in own.items()},
        )

    def restore(self, own: Mapping[str, Generator]) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        for name in self.own.keys() & own.keys():
            _restore(own[name], self.own[name])

    def state_dict(self) -> dict[str, Any]:
        state = self._asdict()
        state["python"] = json.dumps(self.python)
        state["numpy"] = json.dumps(self.numpy, default=np.ndarray.tolist)
        return {key: value for key, value in state.items() if value is not None}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RandomState:
        version, words, gauss = json.loads(state["python"])
        python = (version, tuple(words), gauss)
        return cls(**{**state, "python": python, "numpy": json.loads(state["numpy"])})


def _state_of(generator: Generator) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            state: Any = generator.bit_generator.state
        case np.random.RandomState():
            state = generator.get_state(legacy=False)
        case _:
            state = generator.getstate()
    return json.dumps(state, default=np.ndarray.tolist)


def _restore(generator: Generator, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = json.loads(state)
        case np.random.RandomState():
            generator.set_state(json.loads(state))
        case _:
            version, words, gauss = json.loads(state)
            generator.setstate((version, tuple(words), gauss))
