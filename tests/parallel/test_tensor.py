"""Plans of tensor parallelism: what they match, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from runner.booster.plugin import HybridParallelPlugin, TensorParallelPlugin
from runner.models.gpt import GPT
from runner.parallel.collectives import span
from runner.parallel.tensor import RUNS
from runner.parallel.tensor_styles import PLACED, PlanError, check_heads, checked_plan, plan_of


def gpt(tied=False, heads=2):
    return GPT(16, 8, 2, heads, 8, tied=tied, bias=True, dropout=0.0)


class Adapted(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 2.0


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 3.0


def test_styles_that_place_nothing_work_on_sequences():
    assert RUNS.keys() - PLACED.keys() == {"split_sequence", "whole_sequence"}


def test_a_model_brings_its_own_plan():
    styles = plan_of(gpt())
    assert styles["blocks.1.mlp.up"] == "colwise"
    assert styles["blocks.0.attention.out"] == "rowwise"
    assert styles["head"] == "colwise_rep"


def test_the_last_pattern_of_a_configured_plan_wins():
    plan = {"blocks.*.mlp.*": "colwise", "blocks.1.mlp.down": "rowwise"}
    colwise = dict.fromkeys(("blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.1.mlp.up"), "colwise")
    assert plan_of(gpt(), plan) == colwise | {"blocks.1.mlp.down": "rowwise"}


def test_a_subclass_that_computes_as_a_linear_layer_may_be_split():
    renamed = type("Renamed", (nn.Linear,), {})  # and nothing else
    assert plan_of(nn.Sequential(renamed(2, 2)), {"0": "colwise"}) == {"0": "colwise"}


def test_styles_that_split_no_weight_take_any_layer():
    plan = {"0": "sequence_parallel", "1": "replicated_with_grad_allreduce", "2": "split_sequence"}
    assert plan_of(nn.Sequential(Adapted(2, 2), Adapted(2, 2), Scaled(4, 2)), plan) == plan


@pytest.mark.parametrize(
    ("layer", "plan", "says"),
    [
        (None, {"blocks.*.mlp.upp": "colwise"}, r"matches no module; there are embed"),
        (None, {"blocks.*.mlp.up": "row"}, "style 'row'; use colwise, .*; did you mean rowwise"),
        (None, {"blocks.*.mlp_norm": "rowwise"}, "rowwise is for torch.nn.Linear"),
        (None, {"embed": "colwise"}, "embed: colwise is for torch.nn.Linear, not for Embedding"),
        (None, {}, "GPT has no plan"),
        (nn.Linear(2, 2), None, r"Sequential has no plan .* plugin.tp_plan"),
        (nn.Embedding(4, 2, max_norm=1.0), "embedding_rowwise", "max_norm"),
        (nn.Embedding(4, 2, sparse=True), "embedding_rowwise", "sparse"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "embedding_rowwise", "scale_grad_by_freq"),
        (Adapted(2, 2), "colwise", "0: colwise computes as a plain torch.nn.Linear, and this Ad"),
        (Scaled(4, 2), "embedding_rowwise", "plain torch.nn.Embedding, and this Scaled"),
        (Conv1D(2, 2), "colwise", "0: colwise is for torch.nn.Linear, not for Conv1D"),
        (weight_norm(nn.Linear(2, 2)), "colwise", "this ParametrizedLinear does not"),
    ],
)
def test_a_plan_that_does_not_fit(layer, plan, says):
    model = gpt() if layer is None else nn.Sequential(layer)
    with pytest.raises(PlanError, match=says):
        plan_of(model, {"0": plan} if isinstance(plan, str) else plan)


@pytest.mark.parametrize("given", [{"embed": "embedding_rowwise"}, {"head": "rowwise"}])
def test_tied_weights_are_split_one_way(given):
    model = gpt(tied=True)
    assert plan_of(model) == plan_of(gpt())
    with pytest.raises(PlanError, match=r"head.weight is tied to embed.weight, .* give both"):
        plan_of(model, given)
    # Before any rank starts, also where stages would get copies of their own.
    options = {"tp_size": 2, "pp_size": 2, "tp_plan": given}
    [(key, value, said)] = HybridParallelPlugin.problems(model, 4, options)
    assert (key, value) == ("tp_plan", given)
    assert "head.weight is tied to embed.weight" in said


def test_a_sequence_is_split_by_a_plan_that_does():
    checked_plan(gpt(), None, 2, sequence=True)
    plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    with pytest.raises(PlanError, match="give the style split_sequence to the module"):
        checked_plan(gpt(), plan, 2, sequence=True)
    options = {"sequence_parallel": True, "tp_plan": plan}
    [(key, value, _)] = TensorParallelPlugin.problems(gpt(), 2, options)
    assert (key, value) == ("sequence_parallel", True)
    for fine in ({"sequence_parallel": True}, {"tp_plan": plan}, options | {"tp_size": 1}):
        assert not [*TensorParallelPlugin.problems(gpt(), 2, fine)]


def test_heads_are_not_cut_in_two():
    model = gpt(heads=4)
    check_heads(model, plan_of(model), 2)
    with pytest.raises(PlanError, match=r"blocks.0.attention has 4 heads .* tp_size 3"):
        check_heads(model, plan_of(model), 3)
    # A plan that leaves attention whole cuts none.
    check_heads(model, plan_of(model, {"blocks.*.mlp.up": "colwise"}), 3)


@pytest.mark.parametrize(("length", "parts"), [(7, 2), (5, 4), (3, 4), (8, 4), (0, 2)])
def test_parts_are_those_of_chunk(length, parts):
    shards = [shard.tolist() for shard in torch.arange(length).chunk(parts)] + [[]] * parts
    spans = [span(length, parts, part) for part in range(parts)]
    assert [[*range(start, start + size)] for start, size in spans] == shards[:parts]
