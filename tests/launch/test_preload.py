"""Ranks find everything imported, and a fork server that may be forked where there are GPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner.compose.request import request
from runner.launch import preload

ROOT = Path(__file__).parents[2]
SMALL = ["device=cpu", "tracker=none", "data.batch_size=16", "train.max_duration=3ba"]
TEXT = ["data=text", "data.sequence_length=16", "data.max_bytes=20000", "data.batch_size=4"]
GPT = [*TEXT, "model=gpt", "model.layers=2", "model.width=16", "model.heads=2", "model.context=16"]
MOE = [*TEXT, "model=moe", "model.layers=2", "model.width=16", "model.heads=2", "model.context=16"]

REQUESTS = {
    "ddp": ["plugin=ddp", "plugin.nproc=2"],
    "fsdp": [*GPT, "plugin=fsdp", "plugin.nproc=2", "checkpoint.save_final=true"],
    "zero": [*GPT, "plugin=zero", "plugin.zero_stage=1", "plugin.nproc=2", "optimizer=adamw"],
    "tensor": [*GPT, "plugin=tensor", "plugin.tp_size=2"],
    "pipeline": [*GPT, "plugin=pipeline", "plugin.pp_size=2"],
    "moe": [*MOE, "plugin=moe", "plugin.ep_size=2"],
    "hybrid": [*GPT, "plugin=hybrid", "plugin.tp_size=1", "plugin.pp_size=2"],
}

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
before = len(os.listdir("/proc/self/task"))
for name in sys.argv[1:]:
    import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert len(os.listdir("/proc/self/task")) == before == 1
"""


@pytest.mark.parametrize(
    "plugin",
    ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in REQUESTS if name != "ddp")],
)
def test_a_rank_imports_nothing_by_itself(environment, plugin):
    code = "import sys; from tests.launch.imports import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *SMALL, *REQUESTS[plugin]],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    late = json.loads(done.stdout.splitlines()[-1])
    assert [one for one in late if not one.startswith("sklearn.datasets.d")] == []  # its data files


def test_the_fork_server_asks_for_no_gpu_and_has_no_threads(environment):
    """A driver that was asked, and threads, do not exist in the processes that it forks."""
    wanted = [
        job.config for words in REQUESTS.values() for job in request(words, writes=False).jobs
    ]
    names = preload.modules(wanted)
    assert "sklearn" not in "".join(names)  # what our own modules import they import themselves
    command = [sys.executable, "-c", WITHOUT_A_GPU, *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_of_a_user_are_left_to_the_ranks():
    words = ["data._target_=tests.faulty.slow_data", "plugin=ddp", "plugin.nproc=2"]
    [job] = request(words, writes=False).jobs
    names = preload.modules([job.config])
    assert not any(name.startswith("tests") for name in names)
    assert "torch.optim" in names
