"""``python -m runner bench gpu``, with what only a GPU has replaced by stand-ins on a CPU."""

import math
import warnings
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch

from runner.bench import gpu
from runner.bench.timing import Setting


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path, lambda words: None, quick=True, rounds=1)


@pytest.fixture
def stand_ins(monkeypatch):
    """torch.cuda with a graph that holds the step which was called while it was captured."""
    steps = []
    decisions = []

    def our_step(training):
        step = real_step(training)

        def remembered():
            decision = step()
            steps.append(step)
            decisions.append(decision)
            return decision

        return remembered

    class Graph:
        def replay(self):
            captured, step = self.captured
            captured.norm.copy_(step().norm)

    @contextmanager
    def capture(graph):
        yield
        graph.captured = (decisions[-1], steps[-1])

    real_step = gpu.our_step
    monkeypatch.setattr(gpu, "our_step", our_step)
    for name in ("set_sync_debug_mode", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


def test_every_row_is_measured(setting, stand_ins):
    rows = list(gpu.rows(setting))
    assert all(math.isfinite(row["median"]) for row in rows)
    names = " ".join(row["what"] for row in rows)
    for part in ("copying", "gpt, adaptive", "200 x 64, value", "waits", "epoch", "CUDA graph"):
        assert part in names


def test_waits_of_the_host_are_counted(setting, stand_ins, monkeypatch):
    def waits_twice(decision):
        for _ in range(2):
            warnings.warn(f"{gpu.SYNCHRONIZES} (as torch says)", stacklevel=1)

    monkeypatch.setattr(gpu, "telemetry", lambda sink: Mock())
    assert gpu.waits(setting, Mock())["median"] == 0
    pushes = iter([Mock(), Mock(), Mock(), waits_twice])
    monkeypatch.setattr(gpu, "telemetry", lambda sink: lambda decision: next(pushes)(decision))
    assert gpu.waits(setting, Mock())["median"] == 2


def test_a_captured_step_that_moves_nothing_is_no_measurement(setting, stand_ins, monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    with pytest.raises(RuntimeError, match="nothing moved"):
        gpu.captured(setting)


def test_the_large_gpt_has_about_a_hundred_million_parameters():
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in gpu.gpt(quick=False).parameters())
    assert parameters == pytest.approx(1e8, rel=0.02)
