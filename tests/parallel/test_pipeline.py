"""How a model is cut into stages."""

import pytest
import torch
from torch import nn

from runner.models.gpt import GPT
from runner.parallel.own_stages import copies_of, keep, require_apart, untie
from runner.parallel.stages import CutError, cut, parts_of, stage_to_rank, stages_on

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


def through(parts, hidden):
    for part in parts:
        hidden = part.run(hidden)
    return hidden


def test_a_module_that_a_sequential_has_twice_runs_twice():
    torch.manual_seed(0)
    relu, block = nn.ReLU(), nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(3, 3), relu, block, relu, block, nn.Linear(3, 2))
    stages = cut(model, 3)
    inputs = torch.randn(4, 3)
    assert names([parts_of(model)]) == [["0", "1", "2", "3", "4", "5"]]
    assert torch.equal(through([part for stage in stages for part in stage], inputs), model(inputs))


def test_a_sequential_with_a_forward_of_its_own_has_to_list_its_parts():
    class Residual(nn.Sequential):
        def forward(self, inputs):
            return inputs + super().forward(inputs)

    class Listed(Residual):
        def pipeline(self):
            return [(("0", "1"), self.forward)]

    class Named(nn.Sequential):
        pass

    layers = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(CutError, match=r"Residual .* give it a method pipeline\(\)"):
        cut(Residual(*layers), 2)
    assert names(cut(Listed(*layers), 1)) == [["0", "1"]]
    assert names(cut(Named(*layers), 2)) == [["0"], ["1"]]


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
            assert stage_to_rank(stage, ranks, schedule) == rank
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
    assert copies_of(model, stages, renamed, [0, 1]) == {"embed.weight": [0, 1]}


def test_a_tied_head_on_the_same_stage_stays_one_parameter():
    model = gpt(tied=True)
    stages = cut(model, 1)
    untie(model, stages)
    assert model.head.weight is model.embed.weight
    assert copies_of(model, stages, {}, [0]) == {}


def test_a_block_that_many_stages_use_keeps_one_set_of_parameters():
    block = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(nn.Linear(3, 3), block, block, nn.Tanh(), block, block, nn.Linear(3, 2))
    before = block.weight
    stages = cut(model, 4, ["2", "4", "5"])
    renamed = untie(model, stages)
    assert block.weight is before
    assert renamed == {f"{number}.weight": "1.weight" for number in (2, 4, 5)}
    # As many copies as ranks, however many stages of a rank use it.
    assert copies_of(model, stages, renamed, [0, 1, 2, 3]) == {"1.weight": [0, 1, 2, 3]}
    assert copies_of(model, stages, renamed, [0, 1, 0, 1]) == {"1.weight": [0, 1]}
    require_apart(model, stages, [0, 1, 2, 3])
    with pytest.raises(CutError, match=r"4\.weight .* stages 0 and 2 of one rank"):
        require_apart(model, stages, [0, 1, 0, 1])
    keep(model, stages, [2])
    assert [name for name, _ in model.named_parameters()] == ["1.weight"]


def test_a_weight_tied_to_that_of_a_block_of_many_stages_has_one_copy_a_stage():
    block, near, far = (nn.Linear(3, 3, bias=False) for _ in range(3))
    near.weight = far.weight = block.weight
    model = nn.Sequential(near, block, near, nn.Tanh(), block, block, far)
    stages = cut(model, 3, ["4", "6"])
    renamed = untie(model, stages)
    assert set(renamed.values()) == {"0.weight"}
    assert near.weight is block.weight is not far.weight
    assert torch.equal(far.weight, block.weight)
    assert copies_of(model, stages, renamed, [0, 1, 2]) == {"0.weight": [0, 1, 2]}


def test_a_copy_that_a_later_stage_lists_again_stays_that_copy():
    first, block = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    block.weight = first.weight
    model = nn.Sequential(first, block, nn.Tanh(), block, nn.Linear(3, 2))
    stages = cut(model, 3, ["1", "3"])
    renamed = untie(model, stages)
    assert renamed == {"1.weight": "0.weight", "3.weight": "0.weight"}
    assert first.weight is not block.weight
    assert copies_of(model, stages, renamed, [0, 1, 2]) == {"0.weight": [0, 1, 2]}


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
