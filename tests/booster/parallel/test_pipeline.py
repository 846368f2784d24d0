"""How a model is cut into stages."""

import pytest
import torch
from torch import nn

from runner.booster.parallel.pipeline import (
    CutError,
    cut,
    home_of,
    keep,
    parts_of,
    stages_on,
    untie,
    users_of,
)
from runner.models.gpt import GPT

SIZES = {"vocabulary": 16, "context": 8, "layers": 4, "heads": 2, "width": 8}


def gpt(tied=False):
    return GPT(**SIZES, tied=tied, bias=True, dropout=0.0)


def names(stages):
    return [[name for part in parts for name in part.modules] for parts in stages]


def test_the_chain_is_the_model():
    model = gpt()
    tokens = torch.randint(16, (2, 8))
    hidden = tokens
    for part in parts_of(model):
        hidden = part.run(hidden)
    assert torch.equal(hidden, model(tokens))


def test_stages_have_about_as_many_parameters_each():
    layers = [nn.Linear(4, 4), nn.Linear(4, 40), nn.Linear(40, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    assert names(cut(model, 2)) == [["0", "1"], ["2", "3"]]
    assert names(cut(model, 4)) == [["0"], ["1"], ["2"], ["3"]]
    heavy_end = nn.Sequential(*layers[:1], nn.Linear(4, 4), nn.Linear(4, 400))
    assert names(cut(heavy_end, 2)) == [["0", "1"], ["2"]]


@pytest.mark.parametrize("stages", [2, 3, 5, 7])
def test_every_part_is_in_one_stage_and_none_is_empty(stages):
    found = names(cut(gpt(), stages))
    assert all(found)
    everything = [name for stage in found for name in stage]
    assert everything == [name for part in parts_of(gpt()) for name in part.modules]


def test_a_named_split():
    found = names(cut(gpt(), 3, ["blocks.1", "norm"]))
    assert [stage[0] for stage in found] == ["embed", "blocks.1", "norm"]


@pytest.mark.parametrize(
    ("stages", "starts", "says"),
    [
        (8, None, "8 stages, but GPT has only 7 parts"),
        (2, ["blocks.9"], "no part begins with blocks.9; parts begin with embed, blocks.0"),
        (2, ["positions"], "no part begins with positions"),
        (3, ["blocks.1"], "3 stages have 2 cuts, but 1 names"),
        (3, ["norm", "blocks.1"], "not in the order of the model"),
        (2, ["embed"], "not in the order of the model"),
    ],
)
def test_a_cut_that_cannot_be(stages, starts, says):
    with pytest.raises(CutError, match=says):
        cut(gpt(), stages, starts)


def test_a_model_that_is_no_chain():
    with pytest.raises(CutError, match="LSTM cannot be cut into stages"):
        cut(nn.LSTM(3, 3), 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_every_stage_has_one_home(ranks, schedule):
    held = [stage for rank in range(ranks) for stage in stages_on(rank, ranks, schedule)]
    assert sorted(held) == list(range(len(held)))
    for rank in range(ranks):
        for stage in stages_on(rank, ranks, schedule):
            assert home_of(stage, ranks, schedule) == rank
    if schedule == "zero_bubble":  # its V begins and ends on the first rank
        assert stages_on(0, ranks, schedule) == [0, 2 * ranks - 1]


def test_a_tied_head_on_another_stage_gets_a_copy_under_its_own_name():
    model = gpt(tied=True)
    before = model.embed.weight
    stages = cut(model, 2)
    renamed = untie(model, stages)
    assert renamed == {"head.weight": "embed.weight"}
    assert model.embed.weight is before
    assert model.head.weight is not before
    assert torch.equal(model.head.weight, before)
    assert users_of(model, stages, renamed) == {"embed.weight": [0, 1]}


def test_a_tied_head_on_the_same_stage_stays_one_parameter():
    model = gpt(tied=True)
    stages = cut(model, 1)
    untie(model, stages)
    assert model.head.weight is model.embed.weight
    assert users_of(model, stages, {}) == {}


def test_what_other_stages_use_is_dropped_and_names_stay():
    model = gpt()
    model.register_buffer("of_the_whole", torch.ones(1))
    stages = cut(model, 3, ["blocks.1", "norm"])
    before = {name for name, _ in model.named_parameters()}
    keep(model, stages, [0, 2])
    kept = {name for name, _ in model.named_parameters()}
    assert kept == {
        name for name in before if not name.startswith(("blocks.1", "blocks.2", "blocks.3"))
    }
    assert model.of_the_whole is not None
