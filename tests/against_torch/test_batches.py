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

from runner import Evaluate
from tests.against_torch.conditions import PLUGINS, network, sgd
from tests.against_torch.plain import THRESHOLD, fit, step_by_torch
from tests.ranks import run_ranks

SAMPLES, HELD_OUT, BATCH, STEPS, CLASSES, LENGTH = 22, 7, 12, 4, 6, 6
"""Steps of 12 and 10 samples; 7 held-out samples do not divide into batches of two ranks."""
IGNORED = -100
WEIGHT = torch.tensor([0.05, 4.0, 0.7, 1.5, 0.3, 0.0], dtype=torch.float64)


class ByHand(nn.Module):
    """A weighted mean that only its own method tells the divisor of."""

    def forward(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none") * WEIGHT[targets]
        return losses.sum() / WEIGHT[targets].sum()

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
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(6, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, left, right):
        return self.out((self.left(left) - 2 * self.right(right)).tanh())


class Tagger(nn.Module):
    """Returns a dictionary with its loss, the mean over the labels that are not ignored."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.out = nn.Linear(8, CLASSES)

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


MODELS = {"two_inputs": TwoInputs, "dataclass": TwoInputs}
MODELS |= {"tokens": Tagger, "loss_alone": LossAlone}


class Samples(Dataset):
    def __init__(self, kind, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.kind, self.count = kind, count
        self.x, self.x2 = torch.randn(2, count, 6, dtype=torch.float64, generator=g)
        # Rare and heavy classes are at the end, so that microbatches differ.
        self.classes = torch.randint(CLASSES, (count,), generator=g).sort().values
        self.tokens = torch.randint(11, (count, LENGTH), generator=g)
        tags = torch.randint(CLASSES, (count, LENGTH), generator=g)
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
        match self.kind:
            case "two_inputs":
                return self.x[at], self.x2[at], self.classes[at]
            case "dataclass":
                return Sample(self.classes[at], self.x2[at], self.x[at])
            case "tokens":
                return {"tokens": self.tokens[at], "labels": self.tags[at]}
            case "loss_alone":
                return {"x": self.x[at], "weight": self.weight[at]}
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
            logits = model(*batch[:2])
            targets = batch[2]
        case "dataclass":
            logits = model(batch.left, batch.right)
            targets = batch.target
        case "tokens":
            logits = model(batch["tokens"])["logits"]
            targets = batch["labels"]
        case _:
            return CRITERIA[kind]()(model(batch[0]), batch[1]), None
    logits = logits.reshape(-1, logits.shape[-1])
    targets = targets.reshape(-1)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED)
    right = (logits.argmax(-1) == targets).sum()
    return loss, int(right) / int((targets != IGNORED).sum())


@cache
def reference(kind, plugin):
    """Weights, losses and norms of the steps, and loss and accuracy of the held-out samples."""
    model = make(kind, plugin)
    data = Samples(kind, SAMPLES, 1)
    parts = [data.of(slice(BATCH)), data.of(slice(BATCH, None))] * (STEPS // 2)
    steps = step_by_torch(model, (loss_of(kind, model, part)[0] for part in parts), sgd(model))
    unseen = Samples(kind, HELD_OUT, 2)
    with torch.no_grad():
        loss, accuracy = loss_of(kind, model.eval(), unseen.of(slice(None)))
    if kind == "sum":  # Its mean is logged for the held-out data.
        loss /= WEIGHT[unseen.y].sum()
    return dict(model.named_parameters()), steps, float(loss), accuracy


def trained(plugin, kind, accumulation):
    """Weights and rows under a plugin."""
    spread = PLUGINS[plugin].make()
    model = make(kind, plugin)
    size = BATCH // spread.data_size // accumulation
    loader = spread.prepare_dataloader(Samples(kind, SAMPLES, 1), size)
    held_out = spread.prepare_dataloader(Samples(kind, HELD_OUT, 2), 2)
    options = {"optimizers": sgd(model), "criterion": CRITERIA.get(kind, lambda: None)()}
    options |= {"eval_dataloader": Evaluate(held_out, (), f"{STEPS}ba")}
    return fit(spread, model, loader, STEPS, accumulation_steps=accumulation, **options)[:2]


def all_trained(plugins):
    """Each kind of batch in one or in three microbatches."""
    results = {}
    for plugin in plugins:
        cases = enumerate(ASKED[plugin], [*PLUGINS].index(plugin))
        results[plugin] = [trained(plugin, kind, (1, 3)[turn % 2]) for turn, kind in cases]
    return results


def compare(plugin, kinds, found):
    near = partial(pytest.approx, rel=1e-9)
    for number, kind in enumerate(kinds):
        expected, steps, loss, accuracy = reference(kind, "moe" if plugin == "moe" else "single")
        weights, _ = found[0][plugin][number]
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-11, msg=kind)
        for results in found:
            rows = results[plugin][number][1]
            assert len(rows) == STEPS
            for row, (step_loss, norm) in zip(rows, steps, strict=True):
                assert row["train/loss"] == near(step_loss), kind
                assert row["grad/norm"] == near(norm), kind
                assert row["clip/fraction"] == (norm > THRESHOLD), kind
            assert rows[-1]["eval/loss"] == near(loss), kind
            assert accuracy is None or rows[-1]["eval/accuracy"] == accuracy, kind


ALL = tuple(CRITERIA)
ASKED = {plugin: ALL[turn % 4 : turn % 4 + 2] for turn, plugin in enumerate(PLUGINS)}
ASKED |= dict.fromkeys(("single", "ddp", "pipeline"), ALL)
"""All losses under one plugin of each kind of loop; two under others, which change no loss."""
ASKED |= {plugin: (*ASKED[plugin], *MODELS) for plugin in ("single", "ddp", "fsdp")}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_with_any_loss_over_batches_of_any_structure_are_those_of_torch(ranks):
    plugins = [name for name, kind in PLUGINS.items() if kind.ranks == ranks]
    # Ranks import what they need once for all plugins.
    results = run_ranks(all_trained, ranks, plugins) if ranks > 1 else [all_trained(plugins)]
    for plugin in plugins:
        compare(plugin, ASKED[plugin], results)
