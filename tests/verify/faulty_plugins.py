"""Plugins with the faults that clipping by hand has, for the comparison to find."""

from dataclasses import replace

import torch
import torch.distributed as dist

from runner.booster import PipelineParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin
from runner.booster.plugin import ParallelModel
from runner.clip import Layout


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
