"""Models of torchvision, timm and transformers train as under plain PyTorch, without a wrapper."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from runner.config.problem import RequestError
from runner.config.schema import parse
from runner.train import build
from runner.train.build import make_trainer
from runner.train.preflight import check
from tests.libraries.cases import LIMIT, LR, MOMENTUM, STEPS, plain_of
from tests.ranks import run_ranks

CASES = [
    *(("resnet18", "ddp"), ("vit_tiny", "fsdp"), ("bert", "zero"), ("mixtral", "ddp")),
    *(("llama", "tensor"), ("qwen3", "tensor"), ("gpt2", "fsdp")),
]


def differences(cases):
    """The largest difference of each parameter from plain PyTorch, on the first rank."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name, plugin in cases:
        config = parse(plain_of(name, plugin))
        data = build.make_data(config.data).train
        data.read.clear()
        trainer = make_trainer(config, [], evaluates=False)
        trainer.fit()
        read = [None, None]
        dist.all_gather_object(read, list(data.read))
        weights = trainer.booster.state_dict(trainer.model)
        if dist.get_rank():
            continue
        torch.manual_seed(config.seed)
        model = build.maker(config.model)()
        start = {key: tensor.clone() for key, tensor in model.named_parameters()}
        plainly(model, data, read[: trainer.plugin.data_size], config.data.batch_size)
        wanted = dict(model.named_parameters())
        assert max((wanted[key] - start[key]).abs().max() for key in start) > 1e-4
        found.append({key: float((weights[key] - wanted[key]).abs().max()) for key in wanted})
    return found


def plainly(model, data, read, size):
    """Train by plain PyTorch: the norm clipped, SGD with momentum.

    Images of each rank go through the model in turn, because batch norm is over the samples of one
    rank. Batches of transformers are those of all ranks at once.
    """
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    model.train()
    for step in range(STEPS):
        parts = [each[step * size : (step + 1) * size] for each in read]
        assert sum(map(len, parts)) == 8
        optimizer.zero_grad()
        if isinstance(data.tensors, dict):
            model(**data.batch([*chain.from_iterable(parts)])).loss.backward()
        else:
            for inputs, targets in map(data.batch, parts):
                (F.cross_entropy(model(inputs), targets, reduction="sum") / 8).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((LIMIT / norm).clamp(max=1))
        optimizer.step()


def test_five_steps_are_those_of_plain_pytorch():
    found = run_ranks(differences, 2, CASES, timeout=390)[0]
    for (name, plugin), off in zip(CASES, found, strict=True):
        assert len(off) > 10
        assert {key: each for key, each in off.items() if not each <= 1e-9} == {}, (name, plugin)


@pytest.mark.parametrize(
    ("name", "plugin", "says"),
    [
        ("mixtral", "moe", "model.layers.0.mlp.experts, model.layers.1.mlp.experts"),
        ("gpt2", "tensor", "GPT2LMHeadModel has no plan for tensor parallelism"),
        ("bert", "pipeline", "BertForSequenceClassification cannot be cut into stages"),
        ("vit_tiny", "pipeline", "VisionTransformer cannot be cut into stages"),
        ("llama", "tensor plugin.nproc=4", "model.layers.0.self_attn has 2 heads"),
    ],
)
def test_what_a_plugin_cannot_split_is_said_before_a_rank_starts(name, plugin, says):
    with pytest.raises(RequestError) as raised:
        check(parse(plain_of(name, *plugin.split())))
    assert says in str(raised.value)
