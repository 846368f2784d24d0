"""What the record costs: a loop of 200 steps through Trainer against the same loop written bare.

    python tests/bench/loop.py [--pairs 21] [--limit 1.10]

Both loops read the same loader, step the same fused optimizer and clip in every step. The bare loop
is plain PyTorch: ``torch.nn.utils.clip_grad_norm_(foreach=True)``, no scheduler, no logging. The
Trainer measures, clips, counts, and writes ``metrics.jsonl``. The loops alternate in one process;
printed are the medians and the median of the ratios of adjacent pairs. Exit 1 above the limit.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import GradientClipping, Trainer
from runner.data.dataset import TensorPairs, collate_pairs
from runner.run_folder.rows import JsonlSink

STEPS, BATCH, THRESHOLD = 200, 64, 0.25


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model.append(nn.Linear(128, 10))
    data = TensorPairs(torch.randn(STEPS * BATCH, 64), torch.randint(10, (STEPS * BATCH,)))
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=collate_pairs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    return model, loader, optimizer


def bare() -> float:
    model, loader, optimizer = parts()
    criterion = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), THRESHOLD, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def trained(folder: str) -> float:
    model, loader, optimizer = parts()
    sink = JsonlSink(Path(folder) / f"{time.monotonic_ns()}.jsonl")
    trainer = Trainer(
        model,
        loader,
        f"{STEPS}ba",
        algorithms=[GradientClipping("norm", THRESHOLD)],
        optimizers=optimizer,
        criterion=nn.CrossEntropyLoss(),
        sinks=[sink],
    )
    started = time.perf_counter()
    summary = trainer.fit()
    seconds = time.perf_counter() - started
    assert summary["steps"] == STEPS
    sink.close(summary, 0)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--limit", type=float, default=1.10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bare(), trained(folder)
        pairs = [(bare(), trained(folder)) for _ in range(options.pairs)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    theirs, ours = (1e6 / STEPS * statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"bare {theirs:.0f} us a step, Trainer {ours:.0f} us a step, ratio {ratio:.3f}")
    return int(ratio > options.limit)


if __name__ == "__main__":
    sys.exit(main())
