"""Steps of a process that keeps freed memory, against one that gives it back to the system.

As a program, it takes steps for each line on standard input and answers with their seconds:

    python -m runner.bench.memory kept
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

from runner.bench.commands import answering
from runner.bench.pairs import interleave, milliseconds, ratio
from runner.bench.table import Row, Setting
from runner.launch.allocator import keep_freed_memory

STEPS = 4
"""Steps that are taken for a line."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure one row: a small convolutional network on one thread."""
    words = ["-m", "runner.bench.memory"]
    with answering([*words, "kept"], setting) as kept, answering(words, setting) as plain:
        pairs = 1 if setting.quick and setting.rounds is None else setting.pairs()
        sides = {"given back": plain, "kept": kept}
        times = interleave(sides, pairs, warm_up=0 if setting.quick else 1)
    medians = {name: ms / STEPS for name, ms in milliseconds(times).items()}
    what = "small convolutional network, freed memory kept (1.00: not)"
    yield Row(what, ratio(times["kept"], times["given back"]), 1.00, ms=medians)


def _main(keeps: bool) -> None:
    if keeps:
        keep_freed_memory("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images, targets = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:] == ["kept"])
