"""The library on two ranks, beside torch and pydantic: ``python library_alone.py``.

``tests/test_old_torch.py`` runs it with the lines of README as its arguments.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import runner


def gradients_of(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(5, 6, generator=generator)
    loss = cross_entropy(model(inputs), torch.tensor([0, 1, 2, 3, 0]))
    loss.backward()
    return model, loss


def experts_of_each_rank():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 4)
    model(torch.randn(5, 6)).square().sum().backward()
    return model


def rank(number, store, monitoring, checking):
    dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2)
    if number:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for kind, wrap in (("ddp", DistributedDataParallel), ("fsdp", fully_shard)):
        model, loss = gradients_of(wrap)
        names = {"torch": torch, "model": model, "loss": loss}
        exec(monitoring.replace("runs/mine", f"runs/{kind}"), names)
        decision = names["decision"]
        assert float(decision.norm_clipped) <= 0.2501
        model, loss = gradients_of(wrap)
        names |= {"model": model, "loss": loss}
        exec(checking, names)
    model = experts_of_each_rank()
    groups = {"*": dist.group.WORLD}
    with runner.check_clipping(model, max_norm=0.5, groups=groups) as check:
        decision = runner.apply_gradient_clipping(model, "norm", 0.5, groups=groups)
    print(check.report(decision.norm))
    extra = {"hydra", "omegaconf", "wandb", "numpy", "sklearn", "scipy"} & set(sys.modules)
    assert not extra, extra
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank, (f"{folder}/store", *sys.argv[1:]), nprocs=2)
    print(torch.__version__)


if __name__ == "__main__":
    main()
