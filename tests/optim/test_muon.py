"""Which parameters Muon steps, and that both optimizers are torch's with the given settings."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from runner.clip.head import head_weights
from runner.models.gpt import GPT
from runner.optim.muon import NoHiddenMatrix, hidden_matrices, muon_with_adamw

SHAPE = {"vocabulary": 17, "context": 8, "layers": 2, "heads": 2, "width": 8, "dropout": 0.0}
INNER = ("attention.query", "attention.key", "attention.value", "attention.out")
HIDDEN = {
    f"blocks.{block}.{layer}.weight"
    for block in range(2)
    for layer in (*INNER, "mlp.up", "mlp.down")
}


def gpt(tied):
    torch.manual_seed(0)
    return GPT(**SHAPE, tied=tied, bias=True)


class Mixed(nn.Module):
    """One parameter of each kind."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.bags = nn.EmbeddingBag(5, 4)
        self.class_embedding = nn.Parameter(torch.ones(1, 4))
        self.conv = nn.Conv1d(4, 4, 3)
        self.recurrent = nn.GRU(4, 4)
        self.experts = nn.Parameter(torch.ones(2, 4, 4))
        self.temperature = nn.Parameter(torch.ones(()))
        self.router = nn.Linear(4, 2)
        self.classifier = nn.Linear(4, 3)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer(tied):
    model = gpt(tied)
    assert set(hidden_matrices(model, head_weights(model))) == HIDDEN


def test_each_kind_of_parameter():
    model = Mixed()
    heads = head_weights(model)
    found = set(hidden_matrices(model, heads))
    assert found == {"recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "router.weight"}
    assert "classifier.weight" in set(hidden_matrices(model))  # without heads it is a matrix
    fewer = set(hidden_matrices(model, heads, ["router.*"]))
    assert fewer == found - {"router.weight"}


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"exclude: ruoter\.\* matches no parameter of: class_emb"):
        list(hidden_matrices(Mixed(), (), ["ruoter.*"]))


def test_a_model_without_a_hidden_matrix_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(NoHiddenMatrix, match="Sequential has no hidden matrix, which Muon is for"):
        muon_with_adamw(model, heads=["2.weight"])


def test_every_parameter_is_stepped_once_and_those_of_a_criterion_by_adamw():
    model, criterion = gpt(True), nn.Linear(2, 2)
    optimizers = muon_with_adamw(
        model,
        heads=head_weights(model),
        others=[*criterion.parameters(), model.embed.weight],
    )
    assert [type(each) for each in optimizers] == [Muon, AdamW]
    stepped = [id(p) for each in optimizers for g in each.param_groups for p in g["params"]]
    assert len(stepped) == len(set(stepped))
    assert set(stepped) == {id(p) for p in (*model.parameters(), *criterion.parameters())}
    assert {id(p) for p in optimizers[0].param_groups[0]["params"]} == {
        id(model.get_parameter(name)) for name in HIDDEN
    }


def test_muon_alone_where_nothing_is_left():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    [muon] = muon_with_adamw(model)
    assert type(muon) is Muon


def test_steps_are_those_of_torch_with_these_settings():
    model, other = gpt(False), gpt(False)
    ours = muon_with_adamw(
        model,
        heads=head_weights(model),
        lr=0.03,
        momentum=0.8,
        nesterov=False,
        weight_decay=0.2,
        eps=1e-6,
        ns_steps=3,
        adjust_lr_fn="match_rms_adamw",
        adamw_lr=0.004,
        adamw_betas=(0.7, 0.8),
        adamw_eps=1e-5,
        adamw_weight_decay=0.3,
        fused=False,
    )
    named = dict(other.named_parameters())
    theirs = [
        Muon(
            [p for name, p in named.items() if name in HIDDEN],
            lr=0.03,
            momentum=0.8,
            nesterov=False,
            weight_decay=0.2,
            eps=1e-6,
            ns_steps=3,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(
            [p for name, p in named.items() if name not in HIDDEN],
            lr=0.004,
            betas=(0.7, 0.8),
            eps=1e-5,
            weight_decay=0.3,
            fused=False,
        ),
    ]
    tokens = torch.arange(32).reshape(4, 8) % 17
    for _ in range(4):
        for net, optimizers in ((model, ours), (other, theirs)):
            net(tokens).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name
