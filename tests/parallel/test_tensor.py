"""Plans of tensor parallelism: what they match, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from runner.booster.plugin import HybridParallelPlugin, TensorParallelPlugin
from runner.config.tensor_plan import STYLES
from runner.models.gpt import GPT
from runner.parallel.collectives import span
from runner.parallel.tensor import RUNS
from runner.parallel.tensor_styles import (
    PLACED,
    PlanError,
    check_heads,
    check_sequence,
    plan_of,
)


def gpt(**changes):
    sizes = {"vocabulary": 16, "context": 8, "layers": 2, "heads": 2, "width": 8}
    return GPT(**({"tied": False} | sizes | changes), bias=True, dropout=0.0)


def test_every_style_of_requests_does_something():
    assert PLACED.keys() | RUNS.keys() == STYLES.keys()


def test_a_model_brings_its_own_plan():
    styles = plan_of(gpt())
    assert styles["blocks.1.mlp.up"] == "colwise"
    assert styles["blocks.0.attention.out"] == "rowwise"
    assert styles["head"] == "colwise_rep"


def test_a_given_plan_counts_instead_and_its_last_match_wins():
    given = {"blocks.*.mlp.*": "colwise", "blocks.1.mlp.down": "rowwise"}
    with pytest.raises(PlanError):
        plan_of(gpt(), {**given, "blocks.*.gelu": "colwise"})
    styles = plan_of(gpt(), given)
    assert styles == {
        "blocks.0.mlp.up": "colwise",
        "blocks.0.mlp.down": "colwise",
        "blocks.1.mlp.up": "colwise",
        "blocks.1.mlp.down": "rowwise",
    }


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"blocks.*.mlp.upp": "colwise"}, r"matches no module; did you mean blocks\.\*\.mlp\.up"),
        ({"transformer.h": "colwise"}, "matches no module; there are embed, positions"),
        ({"blocks.*.mlp.up": "columns"}, "unknown style 'columns'; use colwise, rowwise"),
        ({"blocks.*.mlp_norm": "rowwise"}, "blocks.0.mlp_norm: rowwise is for torch.nn.Linear"),
        ({"embed": "colwise"}, "embed: colwise is for torch.nn.Linear, not for Embedding"),
        ({"head": "embedding_rowwise"}, "head: embedding_rowwise is for torch.nn.Embedding"),
        ({}, "GPT has no plan"),
    ],
)
def test_a_plan_that_does_not_fit(plan, says):
    with pytest.raises(PlanError, match=says):
        plan_of(gpt(), plan)


def test_a_model_without_a_plan():
    with pytest.raises(PlanError, match=r"Linear has no plan .* plugin.tp_plan"):
        plan_of(nn.Linear(2, 2))


def test_an_embedding_whose_rows_change_in_the_forward_pass():
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(PlanError, match="max_norm"):
        plan_of(model, {"0": "embedding_rowwise"})


class Adapted(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 2.0


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 3.0


class Renamed(nn.Linear):
    """Another name, and nothing else."""


class Conv1D(nn.Module):
    """What GPT-2 has in the place of a linear layer."""

    weight = None


@pytest.mark.parametrize(
    ("layer", "style", "says"),
    [
        (Adapted(2, 2), "colwise", "0: colwise would replace what Adapted.forward does by what"),
        (Adapted(2, 2), "rowwise", r"or plan a plain torch.nn.Linear inside it"),
        (Scaled(4, 2), "embedding_rowwise", "what Scaled.forward does .* torch.nn.Embedding"),
        (Conv1D(), "colwise", "0: colwise is for torch.nn.Linear, not for Conv1D"),
        (weight_norm(nn.Linear(2, 2)), "colwise", "weight, but that of this ParametrizedLinear"),
    ],
)
def test_a_layer_that_does_more_than_the_plain_one(layer, style, says):
    with pytest.raises(PlanError, match=says):
        plan_of(nn.Sequential(layer), {"0": style})


def test_a_layer_that_does_what_the_plain_one_does():
    assert plan_of(nn.Sequential(Renamed(2, 2)), {"0": "colwise"}) == {"0": "colwise"}
    # These run the layer's own forward.
    plan = {"0": "sequence_parallel", "1": "replicated_with_grad_allreduce", "2": "split_sequence"}
    assert plan_of(nn.Sequential(Adapted(2, 2), Adapted(2, 2), Scaled(4, 2)), plan) == plan


@pytest.mark.parametrize("given", [{"embed": "embedding_rowwise"}, {"head": "rowwise"}])
def test_tied_weights_are_split_one_way(given):
    model = gpt(tied=True)
    assert plan_of(model) == plan_of(gpt())
    says = r"head.weight is tied to embed.weight, which is split another way \(.*\): give both"
    with pytest.raises(PlanError, match=says):
        plan_of(model, given)
    # Before any rank starts, also where stages would get copies of their own.
    options = {"tp_size": 2, "pp_size": 2, "tp_plan": given}
    [(key, value, said)] = HybridParallelPlugin.problems(model, 4, options)
    assert (key, value) == ("tp_plan", given)
    assert "head.weight is tied to embed.weight" in said


def test_a_sequence_is_split_by_a_plan_that_does():
    check_sequence(plan_of(gpt()))
    plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    with pytest.raises(PlanError, match="give the style split_sequence to the module"):
        check_sequence(plan_of(gpt(), plan))
    options = {"sequence_parallel": True, "tp_plan": plan}
    [(key, value, said)] = TensorParallelPlugin.problems(gpt(), 2, options)
    assert (key, value) == ("sequence_parallel", True)
    assert "sequence_parallel=false" in said
    for fine in ({"sequence_parallel": True}, {"tp_plan": plan}, options | {"tp_size": 1}):
        assert TensorParallelPlugin.problems(gpt(), 2, fine) == []


def test_heads_are_not_cut_in_two():
    model = gpt(heads=4)
    check_heads(model, plan_of(model), 2)
    with pytest.raises(PlanError, match=r"blocks.0.attention has 4 heads .* tp_size 3"):
        check_heads(model, plan_of(model), 3)
    # A plan that leaves attention whole cuts none.
    check_heads(model, plan_of(model, {"blocks.*.mlp.up": "colwise"}), 3)


@pytest.mark.parametrize(("length", "parts"), [(7, 2), (5, 4), (3, 4), (8, 4), (0, 2)])
def test_parts_are_those_of_chunk(length, parts):
    shards = list(torch.arange(length).chunk(parts))
    shards += [torch.arange(0)] * (parts - len(shards))
    for part, shard in enumerate(shards):
        start, size = span(length, parts, part)
        assert torch.arange(length)[start : start + size].tolist() == shard.tolist()
