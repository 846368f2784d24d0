"""The loss of a window is its sum over items, divided by their number, whatever the criterion."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.booster.batch import BatchError, batch_size
from runner.booster.candidates import Candidate, Candidates
from runner.booster.divisor import LABELS, Divisor
from runner.booster.loss import WindowLoss
from runner.booster.measurement import settle
from runner.booster.outputs import returned_loss, with_scalar_loss
from runner.data.dataset import IGNORED
from tests.clip.reference import refused


def logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), requires_grad=True)


WEIGHT = torch.tensor([0.0, 2.0, 0.7, 0.3, 5.0])
IMAGE = torch.randn(3, 5, 2, 2, generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([4, 3, 0, 2])  # a part holds a class of weight 0 alone


class WithItems(nn.Module):
    def forward(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none") * WEIGHT[targets]
        return losses.sum() / WEIGHT[targets].sum()

    def loss_items(self, targets):
        return WEIGHT[targets].sum()


CE = nn.CrossEntropyLoss
NLL = nn.NLLLoss(weight=WEIGHT)
OUT = logits(4, 5)
SOFT = OUT.detach().softmax(1)
SOME = torch.tensor([0, 4, IGNORED, 3])
SMOOTH = CE(weight=WEIGHT, label_smoothing=0.2, ignore_index=2)


@pytest.mark.parametrize(
    ("criterion", "outputs", "targets", "items"),
    [
        (CE(), OUT, CLASSES, 4),
        (CE(ignore_index=2), OUT, CLASSES, 3),
        (partial(F.cross_entropy, ignore_index=0), OUT, CLASSES, 3),
        (CE(weight=WEIGHT), OUT, CLASSES, 6.0),
        (SMOOTH, OUT, CLASSES, 5.3),
        (NLL, OUT, SOME, 5.3),
        (partial(F.cross_entropy, weight=WEIGHT), OUT, CLASSES, 6.0),
        (CE(weight=WEIGHT), IMAGE, torch.tensor([[[0, 1], [4, 2]]] * 3), 23.1),
        (CE(weight=WEIGHT), OUT, SOFT, 4),
        (CE(), IMAGE, IMAGE.softmax(1), 12),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), OUT, OUT.detach().sigmoid(), 20),
        (nn.MSELoss(), logits(4, 3), torch.zeros(4, 3), 12),
        (WithItems(), OUT, CLASSES.flip(0), 6.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sums_over_items_of_parts_are_the_mean_of_the_whole(criterion, outputs, targets, items):
    loss = WindowLoss(nn.Identity(), criterion)
    total = counted = 0.0
    for part in (slice(0, 2), slice(2, 3), slice(3, None)):
        batch = (None, targets[part])
        if len(targets[part]):
            part_items = loss.items(batch).items
            total = total + loss.sum(outputs[part], batch, part_items)
            counted = counted + part_items
    torch.testing.assert_close(total / loss.divisor(counted), criterion(outputs, targets))
    assert loss.items((None, targets)).samples == len(targets)
    assert float(counted) == pytest.approx(items)


def test_tokens_that_are_ignored_are_no_items():
    loss = WindowLoss(nn.Identity())
    outputs = logits(2, 3, 5)
    batch = (None, torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 0]]))
    assert loss.items(batch) == (3, 2, 3)
    expected = F.cross_entropy(outputs.reshape(-1, 5), batch[1].reshape(-1), reduction="sum")
    torch.testing.assert_close(loss.sum(outputs, batch, 3), expected)
    soft = logits(2, 3, 5).detach().softmax(-1)
    assert loss.items((None, soft)) == (6, 2, 0)
    expected = F.cross_entropy(outputs.flatten(0, 1), soft.flatten(0, 1))
    torch.testing.assert_close(loss.sum(outputs, (None, soft), 6) / 6, expected)
    # A microbatch of ignored tokens adds nothing and has a gradient.
    batch = (None, torch.full((2, 3), IGNORED))
    assert loss.items(batch) == (0, 2, 0)
    total = loss.sum(outputs, batch, 0)
    total.backward()
    assert total == 0
    assert torch.equal(outputs.grad, torch.zeros_like(outputs))
    assert loss.compares.correct(torch.eye(3), (None, torch.tensor([0, IGNORED, 1]))) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "targets", "items"),
    [
        (nn.CrossEntropyLoss, torch.tensor([0, 4, IGNORED, 3]), 3),
        (nn.MSELoss, torch.zeros(4, 5), 4),
    ],
)
def test_nothing_divides_a_criterion_that_sums(kind, targets, items):
    loss = WindowLoss(nn.Identity(), kind(reduction="sum"))
    outputs = logits(4, 5)
    assert loss.items((None, targets)).items == items
    assert loss.divisor(items) == 1.0
    expected = kind(reduction="sum")(outputs, targets)
    torch.testing.assert_close(loss.sum(outputs, (None, targets), items), expected)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(reduction="none"),
        nn.MSELoss(reduction="none"),
        partial(F.cross_entropy, reduction="none"),
    ],
    ids=["cross entropy", "mean square", "a function"],
)
def test_a_criterion_that_does_not_reduce_is_refused(criterion):
    refused(ValueError, "reduction='none'|'mean'|'sum'", WindowLoss, nn.Identity(), criterion)


class Reduced(nn.CrossEntropyLoss):
    """It reduces what its base returns for each item."""

    def __init__(self):
        super().__init__(reduction="none")

    def forward(self, outputs, targets):
        return super().forward(outputs, targets).sum() / len(targets)


def test_a_class_derived_from_a_criterion_may_reduce_its_losses_itself():
    loss = WindowLoss(nn.Identity(), Reduced())
    batch = (OUT.detach(), CLASSES)
    settle(loss, nn.Identity(), [batch])
    torch.testing.assert_close(loss.sum(OUT, batch, 4), CE(reduction="sum")(OUT, CLASSES))


def test_losses_of_items_are_refused_before_the_first_step():
    loss = WindowLoss(nn.Identity(), lambda o, t: F.cross_entropy(o, t, reduction="none"))
    batch = (OUT.detach(), CLASSES)
    refused(ValueError, "has shape [4]: reduce it", settle, loss, nn.Identity(), [batch])


def test_a_mean_over_each_sample_counts_samples_of_any_length():
    loss = WindowLoss(nn.Identity(), lambda o, t: (o - t).square().mean(1).mean())
    batches = [(torch.randn(4, 5), torch.randn(4, 5)), (torch.randn(2, 3), torch.randn(2, 3))]
    settle(loss, nn.Identity(), batches)
    assert loss.items(batches[0]).items == 2 * loss.items(batches[1]).items


def test_a_criterion_keeps_its_reduction():
    criterion = nn.CrossEntropyLoss()
    WindowLoss(nn.Identity(), criterion)
    assert criterion.reduction == "mean"


class Returned(NamedTuple):
    loss: torch.Tensor
    auxiliary: torch.Tensor
    logits: torch.Tensor


class Counts(nn.MSELoss):
    calls = 0

    def forward(self, outputs, targets):
        self.calls += 1
        return super().forward(outputs, targets)


def test_a_named_loss_counts_beside_others():
    returned = Returned(torch.tensor(1.0), torch.tensor(2.0), torch.zeros(2, 3))
    assert returned_loss(returned) is returned.loss
    assert returned_loss(returned[:2]) is None


def test_a_loss_of_one_element_is_a_number_in_outputs_of_any_form():
    one = torch.ones(1, 1)
    logits = torch.zeros(2, 3)
    named = Returned(one, torch.tensor(2.0), logits)
    space = SimpleNamespace(loss=one, logits=logits)
    for outputs in (one, (logits, one), [one, logits], {"loss": one}, named, space):
        loss = returned_loss(with_scalar_loss(outputs))
        assert loss.shape == ()
        assert loss == 1


def test_the_check_of_a_criterion_leaves_it_as_it_was():
    criterion = Counts()
    settle(WindowLoss(nn.Identity(), criterion), nn.Identity(), [(logits(4, 1), torch.zeros(4, 1))])
    assert criterion.calls == 0


def test_a_class_derived_from_a_criterion_is_known_by_it():
    assert WindowLoss(nn.Identity(), type("Own", (nn.BCELoss,), {})()).binary == "probabilities"


# -- batches


@dataclass
class Named:
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass(slots=True)
class Slots:
    x: torch.Tensor


def test_a_batch_whose_targets_cannot_be_found_is_refused_in_one_message():
    two = torch.zeros(2)
    assert batch_size(Slots(two)) == 2
    for batch, what in (
        ({"x": two, "z": two}, "a dict with the keys 'x', 'z'"),
        (Named(two, "targets"), "a Named with the keys 'inputs', 'targets'"),
        (torch.zeros(2, 3), "a Tensor"),
        ((two, {"labels": two}), "a tuple"),
        ((two, torch.tensor(1)), "a tuple"),
    ):
        words = f"{what}|has to be a pair (inputs, targets)|collate_fn|loss(outputs, batch)"
        items = WindowLoss(nn.Identity(), nn.MSELoss()).items
        refused(BatchError, words, items, batch)


def test_what_an_earlier_version_has_found_is_measured_again():
    loss = WindowLoss(nn.Linear(2, 1), lambda outputs, targets: (outputs - targets).abs().mean())
    assert loss.unproved
    loss.load_state_dict({"unproved": False, "divisor": {"counts": "samples"}})
    assert loss.unproved


class Teacher(nn.Module):
    """A frozen teacher, which follows the model in each forward pass."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x):
        self.teacher.weight.data.lerp_(self.student.weight.data, 0.1)
        return {"loss": (self.student(x) - self.teacher(x)).square().mean()}


def test_a_teacher_that_a_forward_pass_changes_is_as_before_the_measurement():
    model = Teacher()
    before = model.teacher.weight.clone()
    settle(WindowLoss(model, None), model, [{"x": torch.randn(4, 3)}, {"x": torch.randn(2, 3)}])
    assert torch.equal(model.teacher.weight, before)


def test_a_loss_that_is_multiplied_by_nan_tells_nothing_of_its_mean():
    def criterion(outputs, targets):
        return F.cross_entropy(outputs, targets) * float("nan")

    model = nn.Linear(3, 2)
    loss = WindowLoss(model, criterion)
    batches = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(2)]
    settle(loss, model, batches)
    assert loss.unproved


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("places", [(0,), (1,), (2,)])
def test_a_loss_that_is_not_finite_says_nothing_of_those_beside_it(bad, places):
    """Its graph has a term that those of the other microbatches do not have."""

    def criterion(outputs, targets):
        loss = (outputs - targets).square().mean()
        marked = targets == 7
        return loss + bad * (outputs * marked).sum() if marked.any() else loss

    model = nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    loss = WindowLoss(model, criterion)
    settle(loss, model, batches)
    for place in places:
        batches[place][1][0, 0] = 7
    loss.begin_window()
    for number, batch in enumerate(batches):
        value = loss.sum(loss.forward(model, batch), batch, loss.items(batch).items)
        assert bool(value.isfinite()) == (number not in places)
    loss.confirm()


def test_an_infinite_loss_of_the_first_batch_is_measured_in_the_next():
    def criterion(outputs, targets):
        loss = (outputs - targets).square().mean()
        return loss + (1e30 * (outputs * (targets == 7))).square().sum()

    model = nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(2)]
    batches[0][1][0, 0] = 7
    loss = WindowLoss(model, criterion)
    settle(loss, model, batches[:1])
    assert loss.unproved


def test_what_an_earlier_measurement_ignored_is_forgotten():
    loss = WindowLoss(nn.Identity(), lambda outputs, targets: F.cross_entropy(outputs, targets))
    outputs = torch.eye(3)[None]
    batch = {"x": outputs, "labels": torch.tensor([[0, 1, 2]])}

    def graded():
        return int(loss.compares.correct(outputs, batch)[1])

    for forget in (loss.forget, lambda: loss.use(Candidates([Candidate(Divisor("samples"))]))):
        loss.use(Candidates([Candidate(Divisor(LABELS, ignored=1, shifts=True))]))
        assert graded() == 1
        forget()
        assert graded() == 3
