"""Steps on batches of any structure, and with any loss, are those of PyTorch on whole batches.

The reference takes the loss of the whole batch in one process. The Trainer splits a step into one
or three microbatches, over one or several ranks; the last step of an epoch is shorter.
"""

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from runner import Booster, Evaluate, GradientClipping, Log, Trainer
from tests.against_torch.conditions import PLUGINS, network
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SAMPLES, HELD_OUT, BATCH, STEPS, CLASSES, LENGTH = 22, 7, 12, 4, 6, 6
"""Steps of 12 and 10 samples; 7 held-out samples do not divide into batches of two ranks."""
THRESHOLD, IGNORED = 0.5, -100
WEIGHT = torch.tensor([0.05, 4.0, 0.7, 1.5, 0.3, 0.0], dtype=torch.float64)


class ByHand(nn.Module):
    """A weighted mean that only its own method tells the divisor of."""

    def forward(self, outputs, targets):
        each = F.cross_entropy(outputs, targets, reduction="none") * WEIGHT[targets]
        return each.sum() / WEIGHT[targets].sum()

    def loss_items(self, targets):
        return WEIGHT[targets].sum()


CRITERIA = {
    "weight": partial(nn.CrossEntropyLoss, weight=WEIGHT),
    "smoothing": partial(nn.CrossEntropyLoss, weight=WEIGHT, ignore_index=2, label_smoothing=0.2),
    "sum": partial(nn.CrossEntropyLoss, weight=WEIGHT, reduction="sum"),
    "probabilities": partial(nn.CrossEntropyLoss, weight=WEIGHT, label_smoothing=0.1),
    "by_hand": ByHand,
}
"""Losses of pairs; their networks can be distributed by each plugin."""


@dataclass
class Sample:
    """Fields in another order than ``forward`` takes them."""

    target: torch.Tensor
    right: torch.Tensor
    left: torch.Tensor


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


def _bert():
    import transformers

    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"vocab_size": 11, "intermediate_size": 8, "max_position_embeddings": LENGTH}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(num_labels=CLASSES, **shape, **off)
    return transformers.BertForTokenClassification(config)


def _gpt2():
    import transformers

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    shape = {"vocab_size": 11, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **off, **ends))


MODELS = {
    "two_inputs": TwoInputs,
    "dataclass": TwoInputs,
    "tokens": Tagger,
    "loss_alone": LossAlone,
    "bert_tags": _bert,
    "gpt2": _gpt2,
}
STRUCTURES = ("two_inputs", "dataclass", "tokens", "loss_alone")


class Samples(Dataset):
    def __init__(self, kind, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.kind, self.count = kind, count
        self.x, self.x2 = torch.randn(2, count, 6, dtype=torch.float64, generator=g)
        # Rare and heavy classes are at the end, so that microbatches differ.
        self.classes = torch.randint(CLASSES, (count,), generator=g).sort().values
        self.tokens = torch.randint(11, (count, LENGTH), generator=g)
        self.mask = torch.ones(count, LENGTH, dtype=torch.int64)
        self.mask[::3, LENGTH // 2 :] = 0
        tags = torch.randint(11 if kind == "gpt2" else CLASSES, (count, LENGTH), generator=g)
        share = torch.rand(count, 1, generator=g)
        self.tags = tags.masked_fill(torch.rand(count, LENGTH, generator=g) < share, IGNORED)
        self.weight = torch.rand(count, dtype=torch.float64, generator=g) + 0.01
        self.y = self.classes.clone()
        if kind == "probabilities":
            self.y = torch.randn(count, CLASSES, dtype=torch.float64, generator=g).softmax(1)
        elif kind == "smoothing":
            self.y[: count // 2] = 2
        elif kind == "weight":
            self.y[::5] = IGNORED

    def __len__(self):
        return self.count

    def of(self, at):
        """The samples at an index, or a slice: in the structure of this kind of batch."""
        text = {"input_ids": self.tokens[at], "attention_mask": self.mask[at]}
        match self.kind:
            case "two_inputs":
                return self.x[at], self.x2[at], self.classes[at]
            case "dataclass":
                return Sample(self.classes[at], self.x2[at], self.x[at])
            case "tokens":
                return {"tokens": self.tokens[at], "labels": self.tags[at]}
            case "loss_alone":
                return {"x": self.x[at], "weight": self.weight[at]}
            case "bert_tags" | "gpt2":
                return {**text, "labels": self.tags[at]}
            case _:
                return self.x[at, :4] if isinstance(at, slice) else self.x[at][:4], self.y[at]

    __getitem__ = of


def make(kind, plugin):
    torch.manual_seed(0)
    if kind in MODELS:
        return MODELS[kind]().double()
    return network(plugin)


def loss_of(kind, model, batch):
    """The loss of a whole batch, and the share of right answers; PyTorch alone."""
    match kind:
        case "loss_alone":
            return model(**batch), None
        case "two_inputs":
            logits, targets = model(*batch[:2]), batch[2]
        case "dataclass":
            logits, targets = model(batch.left, batch.right), batch.target
        case "tokens":
            logits, targets = model(batch["tokens"])["logits"], batch["labels"]
        case "bert_tags" | "gpt2":
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            logits, targets = model(**inputs).logits, batch["labels"]
        case _:
            return CRITERIA[kind]()(model(batch[0]), batch[1]), None
    if kind == "gpt2":
        logits, targets = logits[:, :-1], targets[:, 1:]
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
    right = (logits.argmax(-1) == targets).sum()
    return loss, int(right) / int((targets != IGNORED).sum())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


@cache
def reference(kind, plugin):
    """Weights, losses and norms of the steps, and loss and accuracy of the held-out samples."""
    model, data = make(kind, plugin), Samples(kind, SAMPLES, 1)
    optimizer, steps = sgd(model), []
    for number in range(STEPS):
        at = slice(BATCH) if number % 2 == 0 else slice(BATCH, None)
        loss, _ = loss_of(kind, model, data.of(at))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        for gradient in gradients:
            gradient *= min(1.0, THRESHOLD / norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm, norm > THRESHOLD))
    unseen = Samples(kind, HELD_OUT, 2)
    with torch.no_grad():
        loss, accuracy = loss_of(kind, model.eval(), unseen.of(slice(None)))
    if kind == "sum":  # Its mean is logged for the held-out data.
        loss /= WEIGHT[unseen.y].sum()
    return dict(model.named_parameters()), steps, float(loss), accuracy


def by_trainer(plugin, cases):
    found = []
    for kind, accumulation in cases:
        spread, model, rows = PLUGINS[plugin].make(), make(kind, plugin), Rows()
        trainer = Trainer(
            model,
            spread.prepare_dataloader(
                Samples(kind, SAMPLES, 1), BATCH // spread.data_size // accumulation
            ),
            f"{STEPS}ba",
            GradientClipping("norm", THRESHOLD),
            Evaluate(spread.prepare_dataloader(Samples(kind, HELD_OUT, 2), 2), (), f"{STEPS}ba"),
            sgd(model),
            criterion=CRITERIA.get(kind, lambda: None)(),
            booster=Booster(plugin=spread),
            accumulation_steps=accumulation,
            log=Log([rows]),
        )
        trainer.fit()
        found.append((trainer.booster.state_dict(trainer.model), rows.rows))
    return found


def cases(plugin, kinds):
    """Kinds of batches, each in one or in three microbatches."""
    turn = [*PLUGINS].index(plugin)
    return [(kind, (1, 3)[(turn + number) % 2]) for number, kind in enumerate(kinds)]


def by_trainers(asked):
    return {plugin: by_trainer(plugin, cases(plugin, kinds)) for plugin, kinds in asked.items()}


def everywhere(ranks, asked):
    """What all ranks find; they import what they need once for all plugins."""
    here = {name: kinds for name, kinds in asked.items() if PLUGINS[name].ranks == ranks}
    return run_ranks(by_trainers, ranks, here, timeout=880) if ranks > 1 else [by_trainers(here)]


def compare(plugin, kinds, found, tolerance=1e-9):
    near = partial(pytest.approx, rel=tolerance)
    for number, kind in enumerate(kinds):
        wanted, steps, loss, accuracy = reference(kind, "moe" if plugin == "moe" else "single")
        weights, _ = found[0][plugin][number]
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                weights[name], tensor.detach(), rtol=tolerance, atol=tolerance / 100, msg=kind
            )
        for results in found:
            rows = results[plugin][number][1]
            assert len(rows) == STEPS
            for row, (step_loss, norm, clipped) in zip(rows, steps, strict=True):
                assert row["train/loss"] == near(step_loss), kind
                assert row["grad/norm"] == near(norm), kind
                assert row["clip/fraction"] == clipped, kind
            assert rows[-1]["eval/loss"] == near(loss), kind
            assert accuracy is None or rows[-1]["eval/accuracy"] == accuracy, kind


ALL = tuple(CRITERIA)
ASKED = {plugin: ALL[at % 4 : at % 4 + 2] for at, plugin in enumerate(PLUGINS)}
ASKED |= dict.fromkeys(("single", "ddp", "pipeline"), ALL)
"""All losses under one plugin of each kind of loop; two under others, which change no loss."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_with_any_loss_are_those_of_torch(ranks):
    found = everywhere(ranks, ASKED)
    for plugin in found[0]:
        compare(plugin, ASKED[plugin], found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_on_batches_of_any_structure_are_those_of_torch(ranks):
    found = everywhere(ranks, dict.fromkeys(("single", "ddp", "fsdp"), STRUCTURES))
    for plugin in found[0]:
        compare(plugin, STRUCTURES, found)


@pytest.mark.parametrize("plugin", ["single", "ddp"])
def test_steps_of_transformers_are_those_of_torch(plugin):
    pytest.importorskip("transformers")
    kinds = ("bert_tags", "gpt2")
    # Their causal loss is computed in float32.
    compare(plugin, kinds, everywhere(PLUGINS[plugin].ranks, {plugin: kinds}), 1e-5)
