"""Batches of any structure, and losses of models: steps are those of PyTorch on whole batches.

The reference takes Σ losses / Σ items of each step in one process. The Trainer splits a step into
two microbatches, over one or two ranks; the last step of the epoch is shorter.
"""

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from runner import GradientClipping, Trainer
from runner.booster import SinglePlugin
from runner.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SAMPLES, HELD_OUT, STEP, STEPS, CLASSES, LENGTH = 22, 7, 8, 5, 5, 6
"""Steps of 8, 8 and 6 samples; 7 held-out samples do not divide into batches of two ranks."""
THRESHOLD = 0.3
IGNORED = -100
PLUGINS = {"single": (1, SinglePlugin), "ddp": (2, TorchDDPPlugin), "fsdp": (2, TorchFSDPPlugin)}


@dataclass
class Sample:
    """Fields in another order than ``forward`` takes them."""

    target: torch.Tensor
    right: torch.Tensor
    left: torch.Tensor


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, left, right):
        return self.out((self.left(left) - 2 * self.right(right)).tanh())


class Tagger(nn.Module):
    """Returns a dictionary with its loss, the mean over the labels that are not ignored."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, CLASSES)

    def forward(self, tokens, labels=None):
        logits = self.out(self.embed(tokens).tanh())
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"logits": logits, "loss": loss}


class LossAlone(nn.Module):
    """Returns nothing but its loss, and states what its mean divides by."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, weight):
        return ((self.layer(x) - x).square().mean(1) * weight).sum() / weight.sum()

    def loss_items(self, batch):
        return batch["weight"].sum()


def _bert(head):
    import transformers

    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=11,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **shape,
    )
    return getattr(transformers, head)(config)


def _gpt2():
    import transformers

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=11, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, **off, **ends
        )
    )


MODELS = {
    "regression": Regression,
    "two_inputs": TwoInputs,
    "dataclass": TwoInputs,
    "tokens": Tagger,
    "loss_alone": LossAlone,
    "bert_tags": partial(_bert, "BertForTokenClassification"),
    "bert_classes": partial(_bert, "BertForSequenceClassification"),
    "gpt2": _gpt2,
}
OWN = ("regression", "two_inputs", "dataclass", "tokens", "loss_alone")
CRITERIA = {"regression": nn.MSELoss}


class Samples(Dataset):
    def __init__(self, kind, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.kind, self.count = kind, count
        self.x = torch.randn(count, 6, dtype=torch.float64, generator=g)
        self.x2 = torch.randn(count, 6, dtype=torch.float64, generator=g)
        self.y = torch.stack([self.x.sum(1), self.x[:, 0] * self.x[:, 1]], 1)
        self.classes = torch.randint(CLASSES, (count,), generator=g)
        self.tokens = torch.randint(11, (count, LENGTH), generator=g)
        self.mask = torch.ones(count, LENGTH, dtype=torch.int64)
        self.mask[::3, LENGTH // 2 :] = 0
        tags = torch.randint(11 if kind == "gpt2" else CLASSES, (count, LENGTH), generator=g)
        share = torch.rand(count, 1, generator=g)
        self.tags = tags.masked_fill(torch.rand(count, LENGTH, generator=g) < share, IGNORED)
        self.weight = torch.rand(count, dtype=torch.float64, generator=g) + 0.01

    def __len__(self):
        return self.count

    def of(self, at):
        """The samples at an index, or a slice: in the structure of this kind of batch."""
        text = {"input_ids": self.tokens[at], "attention_mask": self.mask[at]}
        match self.kind:
            case "regression":
                return {"x": self.x[at], "y": self.y[at]}
            case "two_inputs":
                return self.x[at], self.x2[at], self.classes[at]
            case "dataclass":
                return Sample(self.classes[at], self.x2[at], self.x[at])
            case "tokens":
                return {"tokens": self.tokens[at], "labels": self.tags[at]}
            case "loss_alone":
                return {"x": self.x[at], "weight": self.weight[at]}
            case "bert_classes":
                return {**text, "labels": self.classes[at]}
            case _:
                return {**text, "labels": self.tags[at]}

    __getitem__ = of


def make(kind):
    torch.manual_seed(0)
    return MODELS[kind]().double()


def sum_and_items(kind, model, batch):
    """The sum of the losses of a batch, their number, and how many were right; PyTorch alone."""
    right = None
    match kind:
        case "regression":
            each = (model(batch["x"]) - batch["y"]).square().mean(1)
            return each.sum(), len(each), None
        case "loss_alone":
            each = (model.layer(batch["x"]) - batch["x"]).square().mean(1)
            return (each * batch["weight"]).sum(), float(batch["weight"].sum()), None
        case "two_inputs":
            left, right, targets = batch
            logits = model(left, right)
        case "dataclass":
            logits, targets = model(batch.left, batch.right), batch.target
        case "tokens":
            logits, targets = model(batch["tokens"])["logits"], batch["labels"]
        case _:
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            logits, targets = model(**inputs).logits, batch["labels"]
    if kind == "gpt2":
        logits, targets = logits[:, :-1], targets[:, 1:]
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    right = (logits.argmax(-1) == targets).sum()
    return total, int((targets != IGNORED).sum()), int(right)


@cache
def reference(kind):
    """Weights, losses and norms of the steps, and loss and accuracy of the held-out samples."""
    model, data = make(kind), Samples(kind, SAMPLES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps = []
    for number in range(STEPS):
        start = number % 3 * STEP
        total, items, _ = sum_and_items(kind, model, data.of(slice(start, start + STEP)))
        (total / items).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        for gradient in gradients:
            gradient *= min(1.0, THRESHOLD / norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(total.detach()) / items, norm))
    with torch.no_grad():
        total, items, right = sum_and_items(
            kind, model.eval(), Samples(kind, HELD_OUT, 2).of(slice(None))
        )
    accuracy = None if right is None else right / items
    return dict(model.named_parameters()), steps, float(total) / items, accuracy


def by_trainer(plugin, kinds):
    found = []
    for kind in kinds:
        spread, model, rows = PLUGINS[plugin][1](), make(kind), Rows()
        batch = STEP // 2 // spread.data_size
        trainer = Trainer(
            model,
            spread.prepare_dataloader(Samples(kind, SAMPLES, 1), batch),
            f"{STEPS}ba",
            GradientClipping("norm", THRESHOLD),
            spread.prepare_dataloader(Samples(kind, HELD_OUT, 2), 2),
            torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            criterion=CRITERIA.get(kind, lambda: None)(),
            plugin=spread,
            accumulation_steps=2,
            eval_interval=f"{STEPS}ba",
            sinks=[rows],
        )
        trainer.fit()
        found.append((trainer.booster.state_dict(trainer.model), rows.rows))
    return found


def compare(plugin, kinds, tolerance):
    ranks, _ = PLUGINS[plugin]
    if ranks == 1:
        everywhere = [by_trainer(plugin, kinds)]
    else:
        everywhere = run_ranks(by_trainer, ranks, plugin, kinds)
    for number, kind in enumerate(kinds):
        wanted, steps, loss, accuracy = reference(kind)
        weights, _ = everywhere[0][number]
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                weights[name], tensor.detach(), rtol=tolerance, atol=tolerance / 100, msg=kind
            )
        for results in everywhere:
            rows = results[number][1]
            assert len(rows) == STEPS
            for row, (step_loss, norm) in zip(rows, steps, strict=True):
                assert row["train/loss"] == pytest.approx(step_loss, rel=tolerance), kind
                assert row["grad/norm"] == pytest.approx(norm, rel=tolerance), kind
            assert rows[-1]["eval/loss"] == pytest.approx(loss, rel=tolerance), kind
            assert rows[-1].get("eval/accuracy") == accuracy, kind


@pytest.mark.parametrize("plugin", PLUGINS)
def test_steps_on_batches_of_any_structure_are_those_of_torch(plugin):
    compare(plugin, OWN, 1e-9)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_steps_of_models_of_transformers_are_those_of_torch(plugin):
    pytest.importorskip("transformers")
    # Their causal loss is computed in float32.
    compare(plugin, ["bert_tags", "bert_classes", "gpt2"], 1e-5)
