"""A fork server that may be forked where there are GPUs."""

from runner.launch.supervise import PRELOADED
from tests.process import ROOT, python

# The calls by which a process learns of a GPU or uses it; after any of them its children cannot.
WITHOUT_A_GPU = """
import os, sys, threading
import torch, torch.cuda

def touched(*args, **kwargs):
    raise SystemExit("a GPU was asked for")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
torch._C._cuda_getDeviceCount = torch._C._cuda_init = touched

from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_the_fork_server_asks_for_no_gpu_and_has_no_threads(environment):
    """A driver that was asked, and threads, do not exist in the processes that it forks."""
    python("-c", WITHOUT_A_GPU, *PRELOADED, env=environment, cwd=ROOT)
