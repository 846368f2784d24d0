"""Ranks find everything imported, and a fork server that may be forked where there are GPUs."""

import sys
import tempfile
from pathlib import Path

import pytest

from runner.compose.request import request
from runner.launch import preload, supervise
from runner.train.job import execute
from tests.process import ROOT, python

SMALL = ["device=cpu", "tracker=none", "data.batch_size=16", "train.max_duration=3ba"]
GPT = ["data=text", "data.sequence_length=16", "data.max_bytes=20000", "model=gpt"]
GPT += ["model.layers=2", "model.width=16", "model.heads=2", "model.context=16"]
REQUESTS = {
    "ddp": ["plugin=ddp", "plugin.nproc=2"],
    "fsdp": [*GPT, "plugin=fsdp", "plugin.nproc=2", "checkpoint.save_final=true"],
    "tensor": [*GPT, "plugin=tensor", "plugin.tp_size=2"],
    "pipeline": [*GPT, "plugin=pipeline", "plugin.pp_size=2"],
}
LIBRARIES = {"runner", "torch", "torchvision", "numpy", "scipy", "sklearn", "hydra", "omegaconf"}

# The calls by which a process learns of a GPU or uses it; after any of them its children cannot.
WITHOUT_A_GPU = """
import os, sys, threading
import torch, torch.cuda

def touched(*args, **kwargs):
    raise SystemExit("a GPU was asked for")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
torch._C._cuda_getDeviceCount = torch._C._cuda_init = touched

import runner.launch.rank
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert len(os.listdir("/proc/self/task")) == 1
"""


def train(config, sinks):
    """Train, and return the modules that this rank imported meanwhile."""
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        execute(config, sinks, folder=Path(folder))
    late = sorted(set(sys.modules) - before)
    return {"imported": [one for one in late if one.partition(".")[0] in LIBRARIES]}


def main(words):
    """Print what the first rank of a run imports by itself."""
    [job] = request(words, writes=False).jobs
    with tempfile.TemporaryDirectory() as folder:
        print("imported:", *supervise.train(job.config, Path(folder), [], train)["imported"])


@pytest.mark.parametrize(
    "plugin", ["ddp", *(pytest.param(one, marks=pytest.mark.slow) for one in [*REQUESTS][1:])]
)
def test_a_rank_imports_nothing_by_itself(environment, plugin):
    code = "import sys; from tests.launch.test_preload import main; main(sys.argv[1:])"
    done = python("-c", code, *SMALL, *REQUESTS[plugin], env=environment, cwd=ROOT)
    late = done.stdout.split()[done.stdout.split().index("imported:") + 1 :]
    assert [one for one in late if not one.startswith("sklearn.datasets.d")] == []  # its data files


def test_the_fork_server_asks_for_no_gpu_and_has_no_threads(environment):
    """A driver that was asked, and threads, do not exist in the processes that it forks."""
    own = ["data._target_=tests.faulty.slow_data", "plugin=ddp", "plugin.nproc=2"]
    wanted = [
        job.config
        for words in (*REQUESTS.values(), own)
        for job in request(words, writes=False).jobs
    ]
    names = preload.modules(wanted)
    assert "torch.optim" in names
    assert "sklearn" not in "".join(names)  # what our own modules import they import themselves
    assert not any(name.startswith("tests") for name in names)  # a user's are left to the ranks
    python("-c", WITHOUT_A_GPU, *names, env=environment, cwd=ROOT)
