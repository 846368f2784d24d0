"""Which parameters Muon steps; steps of ``optimizer=muon``, ``lion`` and ``adafactor``, resumed."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from runner.config.notation import Duration
from runner.gradients.units import head_weights
from runner.models.gpt import GPT
from runner.optim.muon import hidden_matrices, muon_with_adamw
from runner.request.request import request
from runner.train.build import make_trainer
from tests.clip.reference import refused
from tests.ranks import run_ranks
from tests.trainers import fitted

SHAPE = {"vocabulary": 17, "context": 8, "layers": 2, "heads": 2, "width": 8, "dropout": 0.0}
INNER = [f"attention.{name}" for name in ("query", "key", "value", "out")] + ["mlp.up", "mlp.down"]
HIDDEN = {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in INNER}


def gpt(tied=False):
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


def test_hidden_matrices_are_those_of_inner_layers():
    for model in (gpt(), gpt(tied=True)):
        assert set(hidden_matrices(model, head_weights(model))) == HIDDEN
    model = Mixed()
    heads = head_weights(model)
    matrices = set(hidden_matrices(model, heads))
    assert matrices == {"recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "router.weight"}
    assert "classifier.weight" in set(hidden_matrices(model))  # without heads it is a matrix
    assert set(hidden_matrices(model, heads, ["router.*"])) == matrices - {"router.weight"}
    words = "exclude ruoter.* matches no parameter"
    last = nn.Sequential(nn.Linear(4, 2))
    refused(ValueError, words, lambda: list(hidden_matrices(model, (), ["ruoter.*"])))
    words = "Sequential has no hidden matrix"
    refused(ValueError, words, muon_with_adamw, last, heads=["0.weight"])
    [muon] = muon_with_adamw(nn.Sequential(nn.Linear(3, 3, bias=False)))
    assert type(muon) is Muon


def test_steps_are_those_of_torch_with_these_settings():
    model = gpt()
    twin = gpt()
    muon = {"lr": 0.03, "momentum": 0.8, "nesterov": False, "weight_decay": 0.2, "eps": 1e-6}
    muon |= {"ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"lr": 0.004, "betas": (0.7, 0.8), "eps": 1e-5, "weight_decay": 0.3}
    settings = muon | {f"adamw_{name}": value for name, value in adamw.items()}
    ours = muon_with_adamw(model, heads=head_weights(model), **settings, fused=False)
    named = dict(twin.named_parameters())
    theirs = [
        Muon([p for name, p in named.items() if name in HIDDEN], **muon),
        AdamW([p for name, p in named.items() if name not in HIDDEN], **adamw, fused=False),
    ]
    tokens = torch.arange(32).reshape(4, 8) % 17
    for _ in range(4):
        for net, optimizers in ((model, ours), (twin, theirs)):
            net(tokens).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


# -- resumed trainings

SMALL = ["model=gpt", "model.context=16", "model.width=16", "model.layers=1", "data=text"]
SMALL += ["data.sequence_length=16", "data.max_bytes=30000", "tracker=none", "device=cpu"]
RUN = [*SMALL, "eval.interval=1000ba", "train.max_duration=4ba", "clip.threshold=0.5"]
ONE_RANK = [("single", name) for name in ("muon", "lion", "adafactor")]
TWO_RANKS = [("zero", "adafactor"), ("fsdp", "muon"), ("zero", "muon")]


def local_tensors(trainer):
    tensors = {shard.name: shard.weight for shard in trainer.optimizer.layout.shards}
    for i, optimizer in enumerate(trainer.optimizer.optimizers):
        for j, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    local = value.to_local() if hasattr(value, "to_local") else value
                    tensors[f"{i}/{j}/{key}"] = local
    return tensors


def require_exact_resume(given, folder):
    """Assert that a training saved after step 2 ends with the bits of one that was not."""
    for plugin, name in given:
        ranks = "data.batch_size=8" if plugin == "single" else "data.batch_size=4 plugin.nproc=2"
        [job] = request([*RUN, f"optimizer={name}", f"plugin={plugin}", *ranks.split()]).jobs
        config = job.config
        whole, second = (make_trainer(config, [], evaluates=False) for _ in range(2))
        first = make_trainer(config, [], evaluates=False, max_duration=Duration(2, "ba"))
        path = fitted(first).save(folder / f"{plugin}_{name}")
        expected = local_tensors(fitted(whole))
        continued = local_tensors(fitted(second, path))
        assert continued.keys() == expected.keys(), (plugin, name)
        differing = [key for key in expected if not torch.equal(continued[key], expected[key])]
        assert differing == [], (plugin, name)


def test_a_training_that_was_saved_continues_with_the_same_bits(tmp_path):
    pytest.importorskip("timm")
    require_exact_resume(ONE_RANK, tmp_path)
    run_ranks(require_exact_resume, 2, TWO_RANKS, tmp_path)
