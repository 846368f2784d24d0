"""How a model is cut into stages, and what each of them keeps."""

import copy
from itertools import chain

import pytest
import torch
from torch import nn

from runner.models.cnn import DigitsCNN
from runner.models.gpt import GPT
from runner.parallel.stages import CutError, cut, keep, keep_own, parts_of

TOKENS = (2, 8)


def gpt(tied=False):
    return GPT(16, 8, 4, 2, 8, tied=tied, bias=True, dropout=0.0)


def shared():
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu, nn.Linear(3, 2))


def names(stages):
    return [[name for part in parts for name in part.modules] for parts in stages]


@pytest.mark.parametrize(
    ("make", "shape", "starts"),
    [
        (gpt, TOKENS, "embed blocks.0 blocks.1 blocks.2 blocks.3 norm head"),
        (shared, (4, 3), "0 1 2 3 4"),
        (lambda: DigitsCNN(3, 4), (2, 1, 8, 8), "features.0 features.1"),
    ],
)
def test_stages_compute_as_the_whole_model(make, shape, starts):
    torch.manual_seed(0)
    model = make()
    assert " ".join(part.modules[0] for part in parts_of(model)).startswith(starts)
    inputs = torch.randint(16, shape) if shape == TOKENS else torch.randn(shape)
    outputs = model(inputs)
    outputs.square().sum().backward()
    for count in (1, 2, 5):
        split = copy.deepcopy(model)
        split.zero_grad()
        hidden = inputs
        boundaries = []
        for number, parts in enumerate(cut(split, count)):
            assert parts
            if number:  # What another rank sends is a leaf of the graph.
                sent = hidden
                hidden = sent.detach().requires_grad_()
                boundaries.append((sent, hidden))
            for part in parts:
                hidden = part.run(hidden)
        assert torch.equal(hidden, outputs)
        hidden.square().sum().backward()
        for sent, received in reversed(boundaries):
            sent.backward(received.grad)
        pairs = zip(model.named_parameters(), split.parameters(), strict=True)
        for (name, parameter), copied in pairs:
            assert_close = torch.testing.assert_close
            assert_close(parameter.grad, copied.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_stages_have_about_as_many_parameters_each_or_begin_where_they_are_told():
    layers = [nn.Linear(4, 4), nn.Linear(4, 40), nn.Linear(40, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    assert names(cut(model, 2)) == [["0", "1"], ["2", "3"]]
    assert names(cut(model, 4)) == [["0"], ["1"], ["2"], ["3"]]
    heavy_end = nn.Sequential(*layers[:1], nn.Linear(4, 4), nn.Linear(4, 400))
    assert names(cut(heavy_end, 2)) == [["0", "1"], ["2"]]
    for stages in (2, 3, 5, 7):
        by_stage = names(cut(gpt(), stages))
        assert all(by_stage)
        assert [*chain(*by_stage)] == [name for part in parts_of(gpt()) for name in part.modules]
    told = names(cut(gpt(), 3, ["blocks.1", "norm"]))
    assert [stage[0] for stage in told] == ["embed", "blocks.1", "norm"]


class Residual(nn.Sequential):
    def forward(self, inputs):
        return inputs + super().forward(inputs)


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.first = nn.Linear(4, 4)

    def pipeline(self):
        return [(("first",), lambda hidden: self.first(hidden + self.token))]


class Listed(nn.Module):
    """Its ``pipeline`` returns what a test gives."""

    def __init__(self, *parts):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.parts = parts

    def pipeline(self):
        return self.parts or [self.first, self.second]


@pytest.mark.parametrize(
    ("make", "stages", "starts", "says"),
    [
        (gpt, 8, None, "8 stages, but GPT has only 7 parts"),
        (gpt, 2, ["blocks.9"], r"blocks\.9 cannot be the starts of 2 stages: name 1 of"),
        (gpt, 2, ["positions"], "positions cannot be the starts"),
        (gpt, 3, ["blocks.1"], "cannot be the starts of 3 stages: name 2"),
        (gpt, 3, ["norm", "blocks.1"], "cannot be the starts"),
        (gpt, 3, ["norm", "norm"], "cannot be the starts"),
        (gpt, 2, ["embed"], "cannot be the starts"),
        (lambda: nn.LSTM(3, 3), 2, None, "LSTM cannot be cut into stages"),
        (lambda: Residual(nn.Linear(3, 3), nn.ReLU()), 2, None, r"method pipeline\(\)"),
        (Loose, 1, None, "token is in no module of a part"),
        (
            lambda: Listed("first"),
            1,
            None,
            "lists str: each part is a module",
        ),
        (lambda: Listed(("first", print)), 1, None, "lists tuple: each part is"),
        (lambda: Listed((["third"], print)), 1, None, "names third, and Listed has no"),
        (lambda: Listed(nn.ReLU()), 1, None, "lists ReLU: each part is a module of Listed"),
    ],
)
def test_a_cut_that_cannot_be(make, stages, starts, says):
    with pytest.raises(CutError, match=says):
        cut(make(), stages, starts)


def test_parts_may_be_modules():
    first, second = cut(Listed(), 2)
    assert [part.modules for part in first + second] == [("first",), ("second",)]


def test_a_tied_weight_has_a_copy_in_each_stage_that_uses_it():
    first = nn.Linear(3, 3, bias=False)
    again = nn.Linear(3, 3, bias=False)
    again.weight = first.weight
    model = nn.Sequential(first, first, nn.Tanh(), again, nn.Linear(3, 3), again, nn.Linear(3, 2))
    with pytest.raises(CutError, match="5 has parameters, and stages 1 and 2 both use it"):
        cut(model, 4, ["2", "4", "6"])
    before = first.weight
    stages = keep_own(model, cut(model, 3, ["2", "6"]), 1, 3, "1f1b")
    assert (stages.numbers, stages.copies) == ([1], {"0.weight": [0, 1]})
    assert stages.renamed == {f"{number}.weight": "0.weight" for number in (1, 3, 5)}
    assert again.weight is not before
    assert again.weight.shape == before.shape
    assert [n for n, _ in model.named_parameters()] == ["3.weight", "4.weight", "4.bias"]


def test_parameters_that_only_other_stages_use_are_dropped():
    model = gpt()
    model.register_buffer("of_the_whole", torch.ones(1))
    before = {name for name, _ in model.named_parameters()}
    keep(model, cut(model, 3, ["blocks.1", "norm"]), [0, 2])
    dropped = ("blocks.1", "blocks.2", "blocks.3")
    kept = {name for name, _ in model.named_parameters()}
    assert kept == {name for name in before if not name.startswith(dropped)}
    assert model.of_the_whole is not None
