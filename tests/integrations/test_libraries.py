"""Models of torchvision, timm and transformers train as under plain PyTorch, without a wrapper.

Everything is in float64, so that rounding cannot explain a difference.
"""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from runner.config.check import parse
from runner.config.problem import RequestError
from runner.data import Data
from runner.request.request import request
from runner.train import build
from runner.train.build import make_trainer
from runner.train.maker import maker
from runner.train.preflight import check
from tests.process import overriding
from tests.ranks import run_ranks

STEPS, LR, MOMENTUM, LIMIT = 5, 0.005, 0.9, 0.25
COMMON = [
    *(f"optimizer.lr={LR}", f"optimizer.momentum={MOMENTUM}", "optimizer.weight_decay=0"),
    *("scheduler=constant", "clip=norm", f"clip.threshold={LIMIT}", "seed=3", "device=cpu"),
    *(f"train.max_duration={STEPS}ba", "tracker=none"),
]
TRANSFORMER = "hidden_size:16,intermediate_size:24,num_hidden_layers:2,num_attention_heads:2"
DECODER = f"{TRANSFORMER},num_key_value_heads:2,vocab_size:32"
MODELS = {
    "resnet18": ("images", "torchvision.models.resnet18 +model.num_classes=10"),
    "vit_tiny": (
        "images",
        "timm.create_model +model.model_name=vit_tiny_patch16_224 +model.img_size=32 "
        "+model.num_classes=10 +model.depth=2",
    ),
    "llama": ("tokens", f"LlamaForCausalLM LlamaConfig,{DECODER}"),
    "qwen3": (
        "tokens",
        f"Qwen3ForCausalLM Qwen3Config,{DECODER},head_dim:8,tie_word_embeddings:true",
    ),
    "mixtral": (
        "tokens",
        f"MixtralForCausalLM MixtralConfig,{DECODER},num_local_experts:4,"
        "experts_implementation:eager",
    ),
    "gpt2": (
        "tokens",
        "GPT2LMHeadModel GPT2Config,vocab_size:32,n_embd:16,n_layer:2,n_head:2,n_positions:16,"
        "resid_pdrop:0,embd_pdrop:0,attn_pdrop:0,bos_token_id:0,eos_token_id:0",
    ),
    "bert": (
        "sentences",
        f"BertForSequenceClassification BertConfig,{TRANSFORMER},vocab_size:32,num_labels:3,"
        "hidden_dropout_prob:0,attention_probs_dropout_prob:0",
    ),
}
"""Data, and target with arguments; of transformers the class and its configuration."""


def plain_of(name, plugin, *more):
    """The configuration of a run on two ranks, to hand to ranks; batch norm sees whole batches."""
    data, words = MODELS[name]
    target, *arguments = words.split()
    parts = 2 if plugin in ("ddp", "fsdp", "zero") else 1
    microbatches = 1
    if data != "images":
        target = f"transformers.{target}"
        microbatches = 2
        arguments = [f"+model.config={{_target_:transformers.{arguments[0]}}}"]
    overrides = [f"plugin={plugin}", "plugin.nproc=2", f"accumulation.steps={microbatches}"]
    overrides += [
        f"data.batch_size={8 // parts // microbatches}",
        f"data._target_={__name__}.{data}",
    ]
    overrides += [f"model._target_={target}", *arguments]
    [job] = request(overriding([*COMMON, *overrides], more)).jobs
    return job.plain


class Recorded(Dataset):
    """Samples in memory (``tensors``, by name or in a tuple) that records which were read."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.read = []

    def __len__(self):
        return len(next(iter(tree_leaves(self.tensors))))

    def __getitem__(self, index):
        self.read.append(index)
        return self.batch(index)

    def batch(self, indices):
        """The samples of these indices, unrecorded."""
        return tree_map(lambda tensor: tensor[indices], self.tensors)


def _integers(below, *shape):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def images():
    """Pairs of random images [3, 32, 32] and random classes."""
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 3, 32, 32, generator=drawn, dtype=torch.float64)
    return _data((inputs, _integers(10, 40)), "samples")


def tokens():
    """Dictionaries of random tokens [8], what a model attends to, and labels, some ignored."""
    inputs = _integers(32, 40, 8)
    mask = torch.ones(40, 8, dtype=torch.int64)
    mask[::3, 5:] = 0
    labels = inputs.masked_fill(_integers(10, 40, 8) < 3, -100)
    return _data({"input_ids": inputs, "attention_mask": mask, "labels": labels}, "tokens")


def sentences():
    """Dictionaries of random tokens [8] and one of three random classes."""
    return _data({"input_ids": _integers(32, 40, 8), "labels": _integers(3, 40)}, "samples")


def _data(tensors, items):
    return Data(Recorded(tensors), Recorded(tensors), items)


CASES = [
    *(("resnet18", "ddp"), ("vit_tiny", "fsdp"), ("bert", "zero"), ("mixtral", "ddp")),
    *(("llama", "tensor"), ("qwen3", "tensor"), ("gpt2", "fsdp")),
]


def trained(cases):
    """For each parameter on the first rank the largest difference from plain PyTorch; of models of
    transformers also loss and accuracy of the held-out samples, as logged and by plain PyTorch.
    """
    torch.set_default_dtype(torch.float64)
    results = []
    for name, plugin in cases:
        config = parse(plain_of(name, plugin))
        data = build.make_data(config.data).train
        data.read.clear()
        trainer = make_trainer(config, [])
        final = trainer.fit()["final"]
        read = [None, None]
        dist.all_gather_object(read, list(data.read))
        weights = trainer.booster.state_dict(trainer.model)
        if dist.get_rank():
            continue
        torch.manual_seed(config.seed)
        model = maker(config.model)()
        start = {key: tensor.clone() for key, tensor in model.named_parameters()}
        plainly(model, data, read[: trainer.plugin.data_size])
        expected = dict(model.named_parameters())
        assert max((expected[key] - start[key]).abs().max() for key in start) > 1e-4, (name, plugin)
        off = {key: float((weights[key] - expected[key]).abs().max()) for key in expected}
        results.append((off, [], []))
        if isinstance(data.tensors, dict):
            judged = [final[key] for key in ("eval/loss", "eval/accuracy")]
            results[-1] = off, judged, judge(model, data.tensors)
    return results


@torch.no_grad()
def judge(model, batch):
    """The loss and the accuracy of a batch."""
    logits = model.eval()(**batch).logits
    labels = batch["labels"]
    if labels.ndim == 2:  # a position tells the next token
        logits = logits[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
    right = (logits.argmax(-1) == labels)[labels >= 0]
    return [float(F.cross_entropy(logits, labels)), float(right.double().mean())]


def plainly(model, data, read):
    """Train by plain PyTorch: the norm clipped, SGD with momentum.

    Images of each rank go through the model in turn, because batch norm is over the samples of one
    rank. Batches of transformers are those of all ranks at once.
    """
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    size = 8 // len(read)
    for step in range(STEPS):
        parts = [indices[step * size : (step + 1) * size] for indices in read]
        assert sum(map(len, parts)) == 8
        optimizer.zero_grad()
        if isinstance(data.tensors, dict):
            model(**data.batch([*chain.from_iterable(parts)])).loss.backward()
        else:
            for inputs, targets in map(data.batch, parts):
                (F.cross_entropy(model(inputs), targets, reduction="sum") / 8).backward()
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((LIMIT / norm).clamp(max=1))
        optimizer.step()


def test_five_steps_are_those_of_plain_pytorch():
    results = run_ranks(trained, 2, CASES)[0]
    for (name, plugin), (off, judged, expected) in zip(CASES, results, strict=True):
        assert judged == pytest.approx(expected, rel=1e-6), (name, plugin)
        assert len(off) > 10, (name, plugin)
        assert {key: error for key, error in off.items() if not error <= 1e-9} == {}, (name, plugin)


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
