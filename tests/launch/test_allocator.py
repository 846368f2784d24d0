"""A process that trains on a CPU keeps the memory that it frees, if its user chose nothing else."""

import os
import re
import sys
from pathlib import Path
from statistics import median

import pytest

from runner.launch import allocator
from tests.process import ROOT, python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc")

FAULTS = """
import resource, sys, torch
from runner.launch.allocator import keep_freed_memory
kept = keep_freed_memory(sys.argv[1])
def step():  # 80 MiB at once, more than glibc keeps by itself
    return torch.ones(2**24), torch.ones(2**22)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counts = []
for _ in range(13):
    before = faults()
    step()
    counts.append(faults() - before)
print(int(kept), *counts[3:])
"""
"""Ten steps that allocate as much as the steps before: how often each had a page mapped."""


def faults(device="cpu", **environ):
    """Return whether memory is kept, and the median over the steps: another thread's block can
    move the heap in one of them."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = python("-c", FAULTS, device, env=clean | environ | {"PYTHONPATH": str(ROOT)})
    kept, *counts = map(int, done.stdout.split())
    return bool(kept), median(counts)


def test_freed_memory_is_used_again():
    kept, count = faults()
    given_back, many = faults("cuda")
    assert (kept, given_back) == (True, False)
    assert count * 10 < many


@pytest.mark.parametrize(
    "words",
    [pytest.param([], marks=pytest.mark.slow), ["plugin=ddp", "plugin.nproc=2"]],
    ids=["single", "ddp"],
)
@pytest.mark.slow
def test_a_run_uses_freed_memory_again(environment, words):
    asked = ["device=cpu", "tracker=none", "train.max_duration=6ba", "eval.interval=100ba", *words]
    python("-m", "runner", *asked, "model._target_=tests.launch.faulting.Faulting", env=environment)
    [folder] = (Path(environment["RUNNER_OUTPUTS"]) / "runs").iterdir()
    text = (folder / "runner.log").read_text()
    for rank in ("rank 0: ", "rank 1: ") if words else ("",):
        counts = [int(n) for n in re.findall(rf" - {rank}faults: (\d+)", text)]
        assert len(counts) >= 6
        assert median(counts[2:]) < 1000  # of 20,480 pages


@pytest.mark.parametrize(
    "chosen", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_the_choice_of_the_user_stays(chosen, monkeypatch):
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocator.ctypes, "CDLL", None)
    assert not allocator.keep_freed_memory("cpu")


def test_another_allocator_is_left_alone(monkeypatch):
    addresses = iter((1, 2))
    monkeypatch.setattr(allocator, "_address", lambda function: next(addresses))
    monkeypatch.setattr(allocator, "_is_chosen", lambda: False)
    assert not allocator.keep_freed_memory("cpu")


def test_another_c_library_is_left_alone(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(allocator.ctypes, "CDLL", missing)
    monkeypatch.setattr(allocator, "_is_chosen", lambda: False)
    assert not allocator.keep_freed_memory("cpu")
