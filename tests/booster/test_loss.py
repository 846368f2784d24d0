import logging
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from runner import Booster, Trainer
from runner.booster import TorchDDPPlugin
from runner.booster.batch import BatchError
from runner.booster.loss import WindowLoss
from runner.data.dataset import IGNORED, TensorPairs
from tests.ranks import run_ranks


def logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_tokens_that_are_ignored_are_no_items():
    targets = torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 0]])
    loss = WindowLoss(nn.Identity())
    batch = (None, targets)
    assert loss.items(batch) == (3, 2, 3)
    outputs = logits(2, 3, 5)
    expected = F.cross_entropy(outputs.reshape(-1, 5), targets.reshape(-1), reduction="sum")
    torch.testing.assert_close(loss.sum(outputs, batch, 3), expected)


def test_a_microbatch_of_ignored_tokens_adds_nothing_and_has_a_gradient():
    batch = (None, torch.full((2, 3), IGNORED))
    loss, outputs = WindowLoss(nn.Identity()), logits(2, 3, 5)
    assert loss.items(batch) == (0, 2, 0)
    total = loss.sum(outputs, batch, 0)
    total.backward()
    assert total == 0
    assert torch.equal(outputs.grad, torch.zeros_like(outputs))


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        F.cross_entropy,
    ],
)
def test_sum_over_items_is_the_mean(criterion):
    targets = torch.tensor([0, 1, 2, 3])
    loss, outputs = WindowLoss(nn.Identity(), criterion), logits(4, 5)
    items, _, tokens = loss.items((None, targets))
    assert tokens == 0
    total = loss.sum(outputs, (None, targets), items)
    torch.testing.assert_close(total / items, criterion(outputs, targets))


def test_what_a_function_was_told_to_ignore_is_no_item():
    targets = torch.tensor([0, 0, 2, 3])
    criterion = partial(F.cross_entropy, ignore_index=0)
    loss, outputs = WindowLoss(nn.Identity(), criterion), logits(4, 5)
    items, _, _ = loss.items((None, targets))
    assert items == 2
    torch.testing.assert_close(
        loss.sum(outputs, (None, targets), items) / items, criterion(outputs, targets)
    )


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(reduction="none"),
        partial(F.cross_entropy, reduction="none"),
        nn.MSELoss(reduction="none"),
    ],
)
def test_a_criterion_that_does_not_reduce_is_refused(criterion):
    with pytest.raises(ValueError, match=r"reduction='none'.*'mean', or 'sum'"):
        WindowLoss(nn.Identity(), criterion)


WEIGHT = torch.tensor([0.1, 2.0, 0.7, 0.3, 5.0])
IMAGE = torch.randn(3, 5, 2, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHT), logits(4, 5), torch.tensor([0, 4, 2, 3])),
        (
            nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2, ignore_index=2),
            logits(4, 5),
            torch.tensor([0, 4, 2, 3]),
        ),
        (nn.NLLLoss(weight=WEIGHT), logits(4, 5), torch.tensor([0, 4, IGNORED, 3])),
        (partial(F.cross_entropy, weight=WEIGHT), logits(4, 5), torch.tensor([0, 4, 2, 3])),
        (partial(F.nll_loss, weight=WEIGHT, ignore_index=0), logits(4, 5), torch.arange(4)),
        (nn.CrossEntropyLoss(weight=WEIGHT), IMAGE, torch.tensor([[[0, 1], [4, 2]]] * 3)),
        (nn.CrossEntropyLoss(weight=WEIGHT), logits(4, 5), logits(4, 5).detach().softmax(1)),
        (nn.CrossEntropyLoss(), IMAGE, IMAGE.softmax(1)),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), logits(4, 5), logits(4, 5).detach().sigmoid()),
        (nn.KLDivLoss(reduction="batchmean"), logits(4, 5), logits(4, 5).detach().softmax(1)),
        (nn.HuberLoss(), logits(4, 5), logits(4, 5).detach() * 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sums_over_items_of_parts_are_the_mean_of_the_whole(criterion, outputs, targets, caplog):
    loss = WindowLoss(nn.Identity(), criterion, checked=True)
    total = items = 0.0
    for at in (slice(0, 2), slice(2, 3), slice(3, None)):
        batch = (None, targets[at])
        if len(targets[at]):
            here = loss.items(batch).items
            total, items = total + loss.sum(outputs[at], batch, here), items + here
    torch.testing.assert_close(total / loss.divisor(items), criterion(outputs, targets))
    assert caplog.text == ""


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="sum")],
)
def test_nothing_divides_a_criterion_that_sums(criterion):
    outputs = logits(4, 5)
    targets = torch.tensor([0, 4, IGNORED, 3])
    if isinstance(criterion, nn.MSELoss):
        targets = torch.zeros(4, 5)
    loss = WindowLoss(nn.Identity(), criterion)
    batch = (None, targets)
    items = loss.items(batch).items
    assert loss.divisor(items) == 1.0
    assert items == (3 if targets.ndim == 1 else 4)
    torch.testing.assert_close(loss.sum(outputs, batch, items), criterion(outputs, targets))


def test_class_probabilities_fit_the_default_criterion():
    outputs, targets = logits(2, 3, 5), logits(2, 3, 5).detach().softmax(-1)
    loss = WindowLoss(nn.Identity())
    assert loss.items((None, targets)) == (6, 2, 0)
    expected = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1))
    torch.testing.assert_close(loss.sum(outputs, (None, targets), 6) / 6, expected)


def test_class_weights_of_zero_leave_the_smoothing_part_of_a_window():
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.3)
    outputs, targets = logits(3, 5), torch.tensor([0, 0, 1])
    loss = WindowLoss(nn.Identity(), criterion)
    parts = [(outputs[:2], (None, targets[:2])), (outputs[2:], (None, targets[2:]))]
    items = [loss.items(batch).items for _, batch in parts]
    assert items == [0.0, 1.0]
    total = sum(loss.sum(out, batch, n) for (out, batch), n in zip(parts, items, strict=True))
    torch.testing.assert_close(total, criterion(outputs, targets))


def test_class_weights_that_change_are_read_anew():
    weight = torch.ones(5)
    loss = WindowLoss(nn.Identity(), nn.CrossEntropyLoss(weight=weight))
    batch = (None, torch.tensor([0, 1]))
    assert loss.items(batch).items == 2.0
    weight *= 3
    assert loss.items(batch).items == 6.0


class Contrastive(nn.Module):
    """Each sample is told from the others of its batch."""

    def forward(self, outputs, targets):
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class WeightedByHand(nn.Module):
    def forward(self, outputs, targets):
        each = F.cross_entropy(outputs, targets, reduction="none") * WEIGHT[targets]
        return each.sum() / WEIGHT[targets].sum()


class WithItems(WeightedByHand):
    def loss_items(self, targets):
        return WEIGHT[targets].sum()


class Counting(WeightedByHand):
    """Keeps what it saw in a buffer and in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = []

    def forward(self, outputs, targets):
        self.seen += len(targets)
        self.calls.append(len(targets))
        return super().forward(outputs, targets)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion = Counting()

    def loss(self, outputs, batch):
        return self.criterion(outputs, batch[1])


def test_the_look_at_a_criterion_leaves_its_state_alone(caplog):
    batch = (None, torch.tensor([0, 1, 4, 4]))
    alone, model = Counting(), OwnLoss()
    for loss in (
        WindowLoss(nn.Identity(), alone, checked=True),
        WindowLoss(model, checked=True),
    ):
        loss.sum(logits(4, 5), batch, 4)
    assert len(caplog.records) == 2
    for criterion in (alone, model.criterion):
        assert (criterion.seen, criterion.calls) == (4, [4])


def test_a_loss_of_one_sample_is_not_read(monkeypatch):
    loss = WindowLoss(nn.Identity(), WeightedByHand(), checked=True)
    reads = []
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: reads.append(tensor) or 1.0)
    for _ in range(2):
        loss.sum(logits(1, 5), (None, torch.tensor([4])), 1)
    assert (reads, loss.checked) == ([], False)


class Across(WeightedByHand):
    """Waits for all ranks."""

    calls = 0

    def forward(self, outputs, targets):
        self.calls += 1
        dist.all_reduce(torch.ones(()))
        return super().forward(outputs, targets)


def steps_of(criteria):
    """Of each criterion, messages about it on this rank, and how often it was called."""
    told = []
    for criterion in criteria:
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("runner.booster.loss").addHandler(handler)
        plugin = TorchDDPPlugin()
        data = TensorPairs(torch.randn(16, 3), torch.arange(16) % 5)
        loader = plugin.prepare_dataloader(data, 4)
        Trainer(nn.Linear(3, 5), loader, "2ba", criterion=criterion, plugin=plugin).fit()
        logging.getLogger("runner.booster.loss").removeHandler(handler)
        told.append(([record.getMessage() for record in records], getattr(criterion, "calls", 0)))
    return told


def test_a_criterion_that_communicates_is_not_called_more_often_on_one_rank():
    first, other = run_ranks(steps_of, 2, [Across(), WeightedByHand()], timeout=120)
    assert first[0] == other[0] == ([], 2)
    assert "not the mean over the items" in first[1][0][0]
    assert other[1] == ([], 0)


def test_one_of_the_ranks_that_read_the_same_samples_looks_at_the_criterion():
    for reports_metrics in (True, False):
        booster = Booster()
        booster.plugin.reports_metrics = reports_metrics
        model, *_ = booster.boost(nn.Linear(3, 5))
        assert booster._loss_of(model, WeightedByHand()).checked == reports_metrics


@pytest.mark.parametrize(
    ("criterion", "warned"),
    [
        (Contrastive(), True),
        (WeightedByHand(), True),
        (WithItems(), False),
        (lambda outputs, targets: F.cross_entropy(outputs, targets), False),
        (nn.MultiMarginLoss(weight=WEIGHT), False),
    ],
    ids=["contrastive", "weighted", "with items", "function", "margin"],
)
def test_a_mean_that_cannot_be_undone_is_warned_about_once(criterion, warned, caplog):
    loss = WindowLoss(nn.Identity(), criterion, checked=True)
    batch = (None, torch.tensor([0, 1, 4, 4]))
    drawn = torch.random.get_rng_state()
    for _ in range(3):
        loss.sum(logits(4, 5), batch, loss.items(batch).items)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warned
    for message in messages:
        assert "not the mean over the items of its parts" in message
        assert "method loss_items(targets)" in message


def test_a_divisor_that_a_criterion_tells_is_used():
    criterion, outputs, targets = WithItems(), logits(4, 5), torch.tensor([0, 1, 4, 4])
    loss = WindowLoss(nn.Identity(), criterion)
    total = items = 0.0
    for at in (slice(1), slice(1, None)):
        here = loss.items((None, targets[at])).items
        total, items = total + loss.sum(outputs[at], (None, targets[at]), here), items + here
    torch.testing.assert_close(total / items, criterion(outputs, targets))


@dataclass
class Named:
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass
class Unlabelled:
    inputs: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ({"x": torch.zeros(2), "z": torch.zeros(2)}, "a dict with the keys 'x', 'z'"),
        (Unlabelled(torch.zeros(2)), "a dataclass Unlabelled with the fields inputs"),
        ((torch.zeros(2),), "a tuple of 1"),
        ([torch.zeros(2), torch.zeros(2), "third"], "a list of 3 whose targets are a str"),
        (torch.zeros(2, 3), "a Tensor"),
        ((torch.zeros(2), {"labels": torch.zeros(2)}), "a pair whose targets are a dict"),
        ((torch.zeros(2), torch.tensor(1)), "a pair whose targets are a tensor without dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_whose_targets_cannot_be_found_is_refused_in_one_message(batch, what):
    with pytest.raises(BatchError) as caught:
        WindowLoss(nn.Identity(), nn.MSELoss()).items(batch)
    message = str(caught.value)
    assert what in message
    for part in ("has to be a pair (inputs, targets)", "collate_fn", "loss(outputs, batch)"):
        assert part in message


@pytest.mark.parametrize("kind", ["dict", "dataclass", "triple"])
def test_a_model_with_a_loss_of_its_own_reads_batches_of_any_structure(kind):
    parts = {"inputs": torch.zeros(4, 2), "targets": torch.zeros(4), "more": torch.zeros(4)}
    batch = {
        "dict": parts,
        "dataclass": Named(parts["inputs"], parts["targets"]),
        "triple": tuple(parts.values()),
    }[kind]

    class Own(nn.Module):
        def loss(self, outputs, batch):
            return outputs.mean()

    class WithItems(Own):
        def loss_items(self, batch):
            return 7

    assert WindowLoss(Own()).items(batch) == (4, 4, 0)
    assert WindowLoss(WithItems()).items(batch) == (7, 4, 0)
    assert WindowLoss(Own()).correct(torch.zeros(4, 3), batch) is None
    with pytest.raises(BatchError, match="has to hold a tensor"):
        WindowLoss(Own()).items({"text": ["a", "b"]})


def test_a_batch_that_does_not_count_has_gradients_whatever_the_outputs_are():
    outputs = {"a": logits(2, 3), "b": [logits(2)], "c": torch.arange(2)}
    total = WindowLoss(nn.Identity(), nn.MSELoss()).sum(outputs, None, None)
    total.backward()
    assert total == 0
    assert torch.equal(outputs["b"][0].grad, torch.zeros(2))


def test_a_regression_counts_samples():
    targets = torch.zeros(4, 3)
    loss = WindowLoss(nn.Identity(), nn.MSELoss())
    outputs = logits(4, 3)
    assert loss.items((None, targets)) == (4, 4, 0)
    torch.testing.assert_close(loss.sum(outputs, (None, targets), 4) / 4, outputs.square().mean())
    assert loss.correct(outputs, (None, targets)) is None


def test_the_criterion_that_was_given_is_left_alone():
    criterion = nn.CrossEntropyLoss()
    WindowLoss(nn.Identity(), criterion)
    assert criterion.reduction == "mean"


def test_a_model_with_a_loss_of_its_own_takes_the_whole_batch():
    class Own(nn.Module):
        def forward(self, batch):
            return batch[0] * 2

        def loss(self, outputs, batch):
            return (outputs - batch[1]).mean()

    model = Own()
    loss = WindowLoss(model)
    batch = (torch.ones(3), torch.zeros(3))
    outputs = loss.forward(model, batch)
    assert loss.sum(outputs, batch, 3) == 6.0


def test_logits_are_taken_out_of_structures():
    class Output:
        logits = torch.ones(2, 3)

    class Structured(nn.Module):
        def forward(self, inputs):
            return Output()

    loss = WindowLoss(Structured())
    assert loss.forward(Structured(), (None, None)) is Output.logits


def test_correct_counts_what_is_not_ignored():
    outputs = torch.eye(3)
    assert WindowLoss(nn.Identity()).correct(outputs, (None, torch.tensor([0, IGNORED, 1]))) == 1
