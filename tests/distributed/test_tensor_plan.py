"""A model with a plan of its own under tensor parallelism, and what a plan leaves out."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.booster.plugin import HybridParallelPlugin
from runner.parallel.tensor_styles import PlanError
from tests.distributed.by_hand import Loop, batch_for, unlike_one_process
from tests.ranks import run_ranks

PLAN = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_rep"}
WHOLE = PLAN | {"norm": "replicated_with_grad_allreduce"}
GATHERED = {**dict.fromkeys(("up", "head"), "colwise_gather_output"), "down": "rowwise_split_input"}


class Heads(nn.Module):
    """A norm of single heads between split layers; the vocabulary divides by no number of ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8, padding_idx=0)
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.RMSNorm(3), nn.Linear(12, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        heads = self.norm(self.up(hidden).unflatten(-1, (-1, 3)))
        return self.head(hidden + self.down(heads.flatten(-2)).tanh())


def loop_of(plan, **sizes):
    torch.manual_seed(0)
    plugin = HybridParallelPlugin(tp_plan=plan, **sizes) if plan else None
    return Loop(plugin, Heads().double())


def stepped(plan, **sizes):
    loop = loop_of(plan, **sizes)
    loop.backward(*batch_for("gpt"))
    return loop.stepped(("adaptive", 0.02, 2.0), ())


def planned():
    world = dist.get_world_size()
    found = [stepped(plan, tp_size=world) for plan in (WHOLE, GATHERED)]
    found += [stepped(WHOLE, tp_size=2, zero_stage=3)] if world == 4 else []
    with pytest.raises(PlanError, match=r"norm.weight: .* replicated_with_grad_allreduce"):
        stepped(PLAN, tp_size=world)
    for token in (17, -1):
        with pytest.raises(IndexError, match="index out of range"):
            loop_of(PLAN, tp_size=world).model(torch.tensor([[2, token, 3]]))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_is_that_of_one_process(world):
    one = stepped(None)
    assert one["metrics"][3] == 1.0
    for ranks in zip(*run_ranks(planned, world), strict=True):
        assert unlike_one_process(ranks, one, 1e-12) == []
