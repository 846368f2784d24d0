from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.data.dataset import IGNORED
from runner.loss import WindowLoss


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


def test_a_criterion_that_sums_is_refused():
    with pytest.raises(ValueError, match="must be a mean"):
        WindowLoss(nn.Identity(), nn.CrossEntropyLoss(reduction="sum"))


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
