"""What the fork server imports once for all ranks, so that each starts within a fork's time.

It calculates nothing, because threads would not exist in the processes that it forks, and asks for
no GPU, because a driver that was asked cannot be used after a fork.
"""

from importlib import import_module

from runner.launch.prepare import importing_torch

MODULES = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.utils.serialization.config", "runner.booster.plugin", "runner.launch.rank"),
)
"""The first optimizer would import ``torch._dynamo``."""

with importing_torch():
    for _name in MODULES:
        import_module(_name)
