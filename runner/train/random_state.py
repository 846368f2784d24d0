"""The random generators of one process: read and restored together."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RandomState(NamedTuple):
    """State of the global generators of Python, NumPy and torch, and of the current GPU's.

    Attributes:
        python: state of :mod:`random`.
        numpy: state of :mod:`numpy.random`.
        cpu: state of torch's CPU generator.
        cuda: state of the current GPU's generator; None in a process that uses no GPU.
        loader: state of the data loader's own generator, if it has one.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None = None
    loader: Tensor | None = None

    @classmethod
    def now(cls, loader: torch.Generator | None = None) -> RandomState:
        """Read the generators of this process, and ``loader``."""
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            random.getstate(),
            np.random.get_state(legacy=False),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if uses_gpu else None,
            None if loader is None else loader.get_state(),
        )

    def restore(self, loader: torch.Generator | None = None) -> None:
        """Set the generators of this process, and ``loader``."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        if self.loader is not None and loader is not None:
            loader.set_state(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and, for Python and NumPy, as JSON."""
        state = self._asdict()
        state["python"] = json.dumps(self.python)
        state["numpy"] = json.dumps(self.numpy, default=np.ndarray.tolist)
        return {key: value for key, value in state.items() if value is not None}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RandomState:
        """Return the random state that :meth:`state_dict` described."""
        version, words, gauss = json.loads(state["python"])
        python = (version, tuple(words), gauss)
        return cls(**{**state, "python": python, "numpy": json.loads(state["numpy"])})
