"""A fork server that may be forked where there are GPUs."""

from runner.compose.request import request
from runner.launch import elastic
from tests.process import ROOT, python

REQUESTS = (
    "plugin=ddp plugin.nproc=2 data._target_=tests.faulty.slow_data",
    "plugin=fsdp plugin.nproc=2 model=gpt data=text optimizer=adamw checkpoint.save_final=true",
    "plugin=hybrid plugin.tp_size=2 plugin.pp_size=2 model=gpt data=text",
    "plugin=moe plugin.ep_size=2 model=moe data=text",
)

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


def test_the_fork_server_asks_for_no_gpu_and_has_no_threads(environment):
    """A driver that was asked, and threads, do not exist in the processes that it forks."""
    jobs = [job for words in REQUESTS for job in request(words.split(), writes=False).jobs]
    names = elastic.preloaded([job.config for job in jobs])
    assert "torch.optim" in names
    assert "sklearn" not in "".join(names)  # what our own modules import they import themselves
    assert not any(name.startswith("tests") for name in names)  # a user's are left to the ranks
    python("-c", WITHOUT_A_GPU, *names, env=environment, cwd=ROOT)
