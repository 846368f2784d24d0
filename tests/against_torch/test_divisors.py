"""What the mean of a loss divides by is found before the first step, or the loss is refused.

The reference takes the loss of all samples of a step in one batch, by PyTorch alone, in float64.
"""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Evaluate, Log, Loss, Trainer
from runner.booster.batch import BatchError
from runner.booster.divisor import LABELS, NOTHING, Divisor, divisors_of, items_of_each
from runner.booster.loss import DivisorError
from tests.distributed.training import Rows

SAMPLES = 12
REFUSED = r"weighted is 1\.\d+ for 6 samples.* is 1\.\d+, .*loss_items.*loss\.items=samples.*none"


class Gpt(nn.Module):
    """Returns logits and a loss that ignores -1, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x, targets=None):
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Labelled(Gpt):
    """The same with another name, which a tuple does not give."""

    def forward(self, x, labels=None):
        return Gpt.forward(self, x, labels)


def masked_mse(outputs, targets):
    mask = ~targets.isnan()
    return ((outputs - targets.nan_to_num()).square() * mask).sum() / mask.sum()


def masked_bce(outputs, targets):
    mask = targets >= 0
    losses = F.binary_cross_entropy_with_logits(outputs, targets.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def weighted(outputs, targets):
    weight = targets.abs()
    return ((outputs - targets).square() * weight).sum() / weight.sum()


def contrastive(outputs, targets):
    outputs = F.normalize(outputs, dim=-1)
    return F.cross_entropy(10 * outputs @ outputs.T, torch.arange(len(outputs)))


def noisy(outputs, targets):
    return ((outputs - targets) * torch.rand_like(outputs)).square().mean()


def tokens(first, second):
    """Inputs, and labels of which so many of nine are not ignored in each microbatch."""
    torch.manual_seed(0)
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    y = torch.randint(4, (2, 9))
    for sample, kept in enumerate((first, second)):
        y[sample, kept:] = -1
    return x, y


def numbers(missing, first_has_all=True):
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64)
    y = torch.randn(SAMPLES, 4).double()
    if missing == -1:
        y = (y > 0).double()
    dropped = torch.rand(y.shape) < 0.6
    dropped[:, 0] = False
    if first_has_all:
        dropped[: SAMPLES // 2] = False
    return x, y.masked_fill(dropped, missing)


def halves(x, y, make=lambda x, y: (x, y)):
    half = len(x) // 2
    return [make(x[:half], y[:half]), make(x[half:], y[half:])]


def named(x, y):
    return {"x": x, "targets": y}


def trained(model, batches, criterion=None, **options):
    rows = Rows()
    options = {"accumulation_steps": len(batches), **options}
    trainer = Trainer(model, batches, "1ba", criterion=criterion, log=Log([rows]), **options)
    trainer.fit()
    return rows.rows[0]


def require(row, model, loss):
    loss.backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters()]
    assert row["grad/norm"] == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-12)
    assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-12)


def made(kind):
    torch.manual_seed(1)
    return kind().double()


@pytest.mark.parametrize("kept", [(1, 9), (0, 9), (9, 2)])
@pytest.mark.parametrize("batch", [named, lambda x, y: (x, y)], ids=["dictionary", "tuple"])
def test_a_model_that_ignores_minus_one_weighs_its_labels(kept, batch):
    x, y = tokens(*kept)
    held_out = Evaluate(halves(x, y, batch))
    row = trained(made(Gpt), halves(x, y, batch), eval_dataloader=held_out, optimizers=None)
    model = made(Gpt)
    require(row, model, model(x, y)[1])


def test_the_held_out_loss_weighs_the_labels_of_its_batches():
    x, y = tokens(1, 9)
    trainer = Trainer(made(Gpt), [], eval_dataloader=halves(x, y, named))
    expected = made(Gpt)(x, y)[1].item()
    assert trainer.evaluate()["eval/loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("first_has_all", [True, False])
@pytest.mark.parametrize(("criterion", "missing"), [(masked_mse, torch.nan), (masked_bce, -1)])
def test_targets_that_a_criterion_leaves_out_are_no_items(criterion, missing, first_has_all):
    x, y = numbers(missing, first_has_all)
    row = trained(nn.Linear(3, 4).double(), halves(x, y), criterion)
    torch.manual_seed(0)
    numbers(missing, first_has_all)
    model = nn.Linear(3, 4).double()
    require(row, model, criterion(model(x), y))


def test_a_mean_over_something_else_is_refused_with_its_divisor():
    torch.manual_seed(1)
    with pytest.raises(DivisorError, match=REFUSED):
        trained(nn.Linear(3, 4).double(), halves(*numbers(0.5)), weighted)


def test_a_mean_over_something_else_may_be_averaged_over_microbatches():
    x, y = numbers(0.5)
    torch.manual_seed(1)
    model = nn.Linear(3, 4).double()
    means = [weighted(model(a), b) for a, b in halves(x, y)]
    expected = sum(means) / 2
    row = trained(model, halves(x, y), Loss(weighted, items="none"))
    require(row, model, expected)


@pytest.mark.parametrize(
    ("criterion", "words"), [(contrastive, "depends on the batch as a whole"), (noisy, "is random")]
)
def test_a_loss_that_cannot_be_measured_is_told_apart(criterion, words, caplog):
    trained(nn.Linear(3, 4).double(), halves(*numbers(0.5)), criterion)
    assert words in caplog.text


class Counting(nn.Module):
    """Counts samples, draws numbers in training, and keeps a buffer and a mean of its batches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("passes", torch.zeros(()))
        self.samples = 0
        self.seen = []

    def forward(self, x, targets):
        self.seen.append(len(x))
        self.samples += len(x)
        self.passes += 1
        outputs = self.layers(x)
        loss = (outputs - targets).square()
        return outputs, loss.mean() if self.samples else loss.sum()


def counting(items):
    """A model that was trained with its loss measured, or with the items of it stated."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Counting().double()
    trained(model, [named(*numbers(0.5))] * 2, Loss(items=items))
    return model


@pytest.mark.parametrize(("items", "passes"), [("auto", 4), ("samples", 2)])
def test_a_measurement_costs_two_passes_of_a_batch(items, passes):
    model = counting(items)
    assert sum(model.seen) <= SAMPLES * passes
    assert model.samples == 2 * SAMPLES


def test_a_measurement_leaves_no_trace():
    states = []
    for items in ("auto", "samples"):
        model = counting(items)
        drawn = [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]
        states.append([*model.state_dict().values(), *drawn])
    for measured, stated in zip(*states, strict=True):
        assert torch.equal(measured, stated)


class Passes(nn.Module):
    """Counts the samples of its forward passes, and computes a loss of its own."""

    def __init__(self, loss):
        super().__init__()
        self.head = nn.Linear(3, 4)
        self.own_loss, self.seen = loss, []

    def forward(self, x, targets):
        self.seen.append(len(x))
        return {"loss": self.own_loss(self.head(x), targets)}


def logits_alone(outputs, targets):
    raise AssertionError


class Logits(Passes):
    def forward(self, x, targets):
        self.seen.append(len(x))
        return {"logits": self.head(x)}


@pytest.mark.parametrize(
    ("kind", "loss", "most"),
    [
        (Passes, masked_mse, 2),
        (Passes, lambda outputs, targets: F.mse_loss(outputs, targets), 2),
        (Passes, lambda outputs, targets: (outputs - targets).square().sum(), 2),
        (Logits, logits_alone, 2),
    ],
    ids=["mean", "mean of torch", "sum", "logits"],
)
def test_a_measurement_passes_each_sample_twice_at_most(kind, loss, most):
    x, y = numbers(torch.nan if loss is masked_mse else 0.5)
    y = torch.randint(4, (len(x),)) if kind is Logits else y
    model = kind(loss).double()
    trained(model, [named(x, y)] * 2, None)
    assert sum(model.seen) == (most + 2) * SAMPLES


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.SmoothL1Loss(), F.l1_loss])
def test_a_criterion_of_torch_is_not_measured(criterion):
    x, y = numbers(0.5)
    passes = []
    model = nn.Linear(3, 4).double()
    model.register_forward_hook(lambda *_: passes.append(1))
    trained(model, halves(x, y), criterion)
    assert len(passes) == 2


def test_a_tuple_whose_targets_the_model_does_not_get_is_refused_with_the_dictionary_to_write():
    x, y = tokens(1, 9)
    with pytest.raises(BatchError, match=r'dictionaries .* \{"x": x, "targets": y\}'):
        trained(made(Labelled), halves(x, y))


class Padded(nn.Module):
    """Masks the last word of a padded vocabulary."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(x).index_fill(-1, torch.tensor([3]), -torch.inf)


def test_a_microbatch_without_labels_adds_zero_where_logits_are_infinite():
    x, y = tokens(0, 9)
    y = y.clamp(max=2).masked_fill(y < 0, -100)
    row = trained(made(Padded), halves(x, y), eval_dataloader=halves(x, y))
    model = made(Padded)
    require(row, model, F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    assert np.isfinite(row["eval/loss"])


class Summed(nn.Module):
    """Returns a sum of torch that is divided by the samples: of one sample, it looks like a sum."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x, labels=None):
        return {"loss": F.mse_loss(self.head(x), labels, reduction="sum") / len(x)}


def test_a_sum_that_the_model_divides_by_its_samples_is_a_mean_over_them():
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64)
    y = torch.randn(SAMPLES, 4, dtype=torch.float64)
    parts = [{"x": x[:8], "labels": y[:8]}, {"x": x[8:], "labels": y[8:]}]
    row = trained(made(Summed), parts)
    model = made(Summed)
    require(row, model, model(x, y)["loss"])


class Selecting(Gpt):
    """Selects the labels that are not -1 itself, as many models do."""

    def forward(self, x, targets=None):
        logits = self.head(x)
        kept = targets != -1
        return logits, F.cross_entropy(logits[kept], targets[kept])


@pytest.mark.parametrize("kept", [(1, 9), (9, 1)])
def test_labels_that_a_model_selects_are_its_items(kept):
    x, y = tokens(*kept)
    row = trained(made(Selecting), halves(x, y, named))
    model = made(Selecting)
    require(row, model, model(x, y)[1])


class Line(nn.Linear):
    def __init__(self):
        super().__init__(3, 4)


def own_sum(outputs, targets):
    return (outputs - targets).square().sum()


def test_a_sum_of_ones_own_is_divided_by_nothing():
    x, y = numbers(0.5)
    row = trained(made(Line), halves(x, y), own_sum)
    model = made(Line)
    require(row, model, own_sum(model(x), y))


def test_items_of_another_name_are_refused():
    with pytest.raises(ValueError, match="auto, samples, labels or none, not 'sample'"):
        Loss(items="sample")


class Handmade(Gpt):
    """Ignores -1 by hand, which only a batch with such labels shows."""

    def forward(self, x, targets=None):
        logits = self.head(x)
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none"
        )
        kept = targets.flatten() >= 0
        return logits, (losses * kept).sum() / kept.sum()


def test_a_continued_training_counts_what_was_found_before():
    x, y = tokens(1, 9)
    first = Trainer(made(Handmade), halves(x, y, named), "1ba", accumulation_steps=2)
    first.fit()
    counted = first.loss.state_dict()
    assert not counted["unproved"]
    second = Trainer(made(Handmade), halves(x, y, named), "1ba", accumulation_steps=2)
    second.state.load_state_dict(first.state.state_dict())
    assert second.loss.state_dict() == counted
    batch = named(x, y)
    assert second.loss.items(batch) == first.loss.items(batch)


def test_counts_that_read_labels_once_are_those_of_each_way_to_count():
    labels = torch.randint(-2, 5, (4, 9))
    labels[0] = torch.tensor([-9999, -100, -1, 0, 1, 254, 255, 256, 2**40])
    batch = (torch.randn(4, 9), labels)
    divisors = [*divisors_of(batch), Divisor(LABELS, ignored=50256)]
    assert sum(divisor.counts != NOTHING for divisor in divisors) > 20
    assert list(items_of_each(divisors, batch)) == [divisor.items(batch) for divisor in divisors]


ELEMENTWISE = [
    nn.MSELoss(),
    nn.BCELoss(),
    nn.HuberLoss(),
    F.l1_loss,
    partial(F.smooth_l1_loss, beta=0.1),
]


@pytest.mark.parametrize("criterion", ELEMENTWISE, ids=["MSE", "BCE", "Huber", "l1", "partial"])
def test_a_mean_of_torch_over_elements_has_the_weight_of_sequences_of_unequal_lengths(criterion):
    batches = [(torch.randn(2, n, 3).double(), torch.rand(2, n, 4).double()) for n in (2, 5, 3, 7)]
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid()).double()
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    held_out = Evaluate(batches[:2], interval="1ba")
    log = Log([rows := Rows()])
    options = {"optimizers": sgd, "criterion": criterion, "accumulation_steps": 2, "log": log}
    Trainer(model, batches, "2ba", eval_dataloader=held_out, **options).fit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for window in (batches[:2], batches[2:]):
        optimizer.zero_grad()
        _mean_over_elements(criterion, plain, window).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-14)
    expected = _mean_over_elements(criterion, plain, batches[:2]).item()
    assert rows.rows[-1]["eval/loss"] == pytest.approx(expected, rel=1e-12)


def _mean_over_elements(criterion, model, batches):
    outputs = torch.cat([model(inputs).flatten() for inputs, _ in batches])
    return criterion(outputs, torch.cat([targets.flatten() for _, targets in batches]))
