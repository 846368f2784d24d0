"""Parts of models that list none: by a plan of transformers, or by a trace of torch.fx."""

import copy

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from runner.parallel.stages import CutError, cut, parts_of

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "vocab_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def decoder(kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def assert_same(model, inputs, stages):
    """The stages after one another give the outputs and the gradients of the model."""
    model.zero_grad()
    wanted = model(inputs)
    wanted = getattr(wanted, "logits", wanted)
    wanted.square().sum().backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    hidden = inputs
    for number, parts in enumerate(cut(other, stages)):
        assert parts
        if number:  # What another rank sends is a leaf of the graph.
            below, hidden = hidden, hidden.detach().requires_grad_()
            received = hidden
        for part in parts:
            hidden = part.run(hidden)
        if number == stages - 1:
            assert torch.equal(hidden, wanted)
            hidden.square().sum().backward()
            if stages == 2:
                below.backward(received.grad)
    if stages <= 2:
        for (name, one), another in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, another.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        ("Mixtral", {"num_local_experts": 4}),
        ("Gemma2", {"head_dim": 8, "sliding_window": 4}),  # layers differ; logits are capped
    ],
)
def test_parts_of_a_plan_of_transformers(kind, more):
    model = decoder(kind, **more)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    for stages in (1, 2, 5):
        assert_same(model, tokens, stages)
    listed = [part.modules for part in parts_of(model)]
    assert listed[0] == ("model.embed_tokens",)
    assert listed[1:4] == [(f"model.layers.{i}",) for i in range(3)]


def test_a_model_that_computes_between_the_modules_of_its_plan():
    model = decoder("Granite", embedding_multiplier=2.0)
    with pytest.raises(CutError, match="between the modules of its plan for pipelines"):
        cut(model, 2)


class Nested(nn.Module):
    """Blocks with skip connections and changes in place."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, images, scale=1.0):
        hidden = self.stem(images)
        for block in self.blocks:
            skipped = hidden
            hidden = block(hidden)
            hidden += skipped
            hidden = F.relu(hidden, inplace=True)
        return self.head(hidden.mean((2, 3))) * scale


def test_parts_of_a_trace():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for stages in (1, 2, 5):
        assert_same(Nested(), images[..., :6, :6], stages)
    assert_same(torchvision.models.resnet18(num_classes=3).eval(), images, 2)
    starts = [part.modules[0] for part in parts_of(Nested())]
    assert starts == ["stem.0", "blocks.0", "blocks.1", "blocks.2", "head"]
    stages = cut(Nested(), 2, ["blocks"])
    assert stages[1][0].modules == ("blocks.0",)


def test_a_traced_model_computes_by_its_mode():
    model = torchvision.models.resnet18(num_classes=3)
    parts = parts_of(model)
    before = model.bn1.running_mean.clone()
    images = torch.randn(2, 3, 32, 32)
    for training in (False, True):
        model.train(training)
        hidden = images
        for part in parts:
            hidden = part.run(hidden)
        assert torch.equal(model.bn1.running_mean, before) is not training


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden):
        return self.second(F.dropout(self.first(hidden), 0.5, self.training))


class Looks(Dropped):
    def forward(self, hidden):
        return self.second(hidden) if hidden.sum() > 0 else self.first(hidden)


class Loose(Dropped):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))

    def forward(self, hidden):
        return self.second(self.first(hidden) + self.token)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Dropped, "its forward differs between training and evaluation"),
        (Looks, "torch.fx cannot trace it"),
        (Loose, "token is in no module of a part"),
    ],
)
def test_what_cannot_be_traced_says_so(kind, says):
    with pytest.raises(CutError, match=says):
        cut(kind(), 2)
