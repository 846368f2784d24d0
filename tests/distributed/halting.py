"""A clipping mode that halts a run in one step, and a model that writes down what it sees."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from runner.clip import ClipMode, Decision, GradStats, Layout, ModeInfo, limit_norm

HALTED = "TESTS_HALTED"
"""Variable with the file that is made when the run halts; it halts once."""

SEEN = "TESTS_SEEN"
"""Variable with the folder to which each rank writes what its model sees."""


@dataclass
class HaltOnce(ClipMode):
    """Limit the norm, and wait to be killed in one step, before anything of it is applied."""

    info = ModeInfo(stat="‖G‖", note="")
    initial_history = {"steps": 0.0}  # noqa: RUF012

    at: int = 37

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        self.history["steps"] = self.history["steps"] + 1
        halted = Path(os.environ[HALTED])
        if self.history["steps"] == self.at and not halted.exists() and _rank() == 0:
            halted.touch()
            time.sleep(600)
        return limit_norm(stats.norm, self.limit)


class Witness(nn.Module):
    """A net with dropout that writes down its inputs, random state and weights, each as a hash."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        if self.training and not images.is_meta:
            seen = [[images], [torch.get_rng_state()], self.parameters()]
            with Path(os.environ[SEEN], f"{_rank()}.jsonl").open("a") as file:
                file.write(json.dumps([os.getpid(), *map(_hash, seen)]) + "\n")
        out: Tensor = self.layers(images)
        return out


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _hash(tensors: Iterable[Tensor]) -> str:
    held = hashlib.sha256()
    for tensor in tensors:
        held.update(tensor.detach().numpy().tobytes())
    return held.hexdigest()[:16]
