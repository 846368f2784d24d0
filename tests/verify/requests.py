"""Small requests, their verification on ranks, and plugins with the faults of clipping by hand."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from runner.booster import PipelineParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from runner.booster.plugin import ParallelModel
from runner.config.check import parse
from runner.gradients import Layout
from runner.request.request import request
from runner.train import build
from runner.verify.verify import execute

TOKENS = [
    *("data=synthetic", "data.kind=tokens", "data.sequence_length=12", "data.vocabulary=32"),
    *("data.samples=70", "data.ignored_fraction=0.3", "data.batch_size=4", "device=cpu"),
    *("model=gpt", "model.vocabulary=32", "model.context=12", "model.layers=4", "model.heads=4"),
    *("model.width=12", "verify.steps=3"),
]
IMAGES = ["data=synthetic", "data.samples=70", "data.batch_size=8", "device=cpu", "verify.steps=3"]


def net(name):
    """Words for a model of :mod:`tests.verify.nets`."""
    return [f"model._target_=tests.verify.nets.{name}"]


def plain_of(*words):
    """The configuration that ``words`` give, to hand to ranks."""
    [job] = request(list(words)).jobs
    return job.plain


def verify(plain, faulty=None):
    """What a rank returns."""
    plugin = globals()[faulty] if faulty else None
    with patch.object(build, "make_plugin", lambda _: plugin()) if plugin else nullcontext():
        return execute(parse(plain))


class CountsReplicasTwice(TorchDDPPlugin):  # Adds up what all hold alike
    def configure(self, model):
        spread = super().configure(model)
        return replace(spread, layout=Layout(spread.layout.shards, dist.group.WORLD))


class SeesReplicasThatAreNotThere(TorchDDPPlugin):  # Divides by two what is held once
    def configure(self, model):
        spread = super().configure(model)
        shards = [replace(shard, num_replicas=2) for shard in spread.layout.shards]
        return replace(spread, layout=Layout(shards, dist.group.WORLD))


class ForgetsToReduce(TorchDDPPlugin):  # Every rank steps by the gradient of its own samples
    def configure(self, model):
        return ParallelModel(Layout.of_model(model))


class ClipsByStage(PipelineParallelPlugin):  # By the norm of each stage's own gradients
    def configure(self, model):
        spread = super().configure(model)
        return replace(spread, layout=Layout(spread.layout.shards))


class ZerosForUnusedParameters(TorchFSDPPlugin):  # Of no rank, in place of None
    def configure(self, model):
        spread = super().configure(model)

        def sync_grads():
            spread.sync_grads()
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

        return replace(spread, sync_grads=sync_grads)
