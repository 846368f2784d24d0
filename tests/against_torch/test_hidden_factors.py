"""A number of a loss that is constant in the first step, and varies later, is seen then.

The loss is that of one batch to 1e-13, by PyTorch alone in float64, or it is refused and the
weights stay. The first step hides what the later ones show: weights of 1, a mask without holes,
samples of one length, labels that no class is missing from.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Booster, Log, Trainer
from runner.booster.loss import DivisorError
from tests.against_torch.test_own_losses import (
    LENGTH,
    SAMPLES,
    WORDS,
    batches,
    cross_entropies,
    fused,
    made,
    masked,
    of_one_batch,
    parts,
    parts_of_rank,
    ratios,
    value_of,
)
from tests.against_torch.test_own_losses import Case as OwnLoss
from tests.distributed.cases import Ddp, Fsdp
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SEEDS = (0, 1, 2)


def steps_of(hide, show):
    """A batch of each step: something is hidden in the first one, and shown by the others."""
    steps = []
    for seed in SEEDS:
        batch = batches(seed)[1]
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(SAMPLES, generator=generator, dtype=torch.float64)
        steps.append({**batch, "of_samples": weights + 0.2})
    return [hide(steps[0]), *[show(batch) for batch in steps[1:]]]


def unchanged(batch):
    return batch


def ones(name):
    def hide(batch):
        return {**batch, name: torch.ones_like(batch[name])}

    return hide


def without_rare_labels(batch):
    return {**batch, "labels": batch["labels"].clamp(max=WORDS - 2)}


def with_every_label_once(batch):
    labels = torch.full((SAMPLES, LENGTH), -100)
    labels[:, :WORDS] = torch.arange(WORDS)
    return {**batch, "labels": labels}


def without_zeros(batch):
    return {**batch, "labels": batch["labels"].clamp(min=1)}


def with_zeros(batch):
    return {**batch, "labels": batch["labels"].clamp(min=1).masked_fill(~batch["mask"], 0)}


def ignoring(label):
    def show(batch):
        return {**batch, "labels": batch["labels"].masked_fill(~batch["mask"], label)}

    return show


def times_weights(net, batch):
    return (cross_entropies(net, batch).mean(1) * batch["of_samples"]).mean()


def over_weights(net, batch):
    weights = batch["of_samples"]
    return (cross_entropies(net, batch).mean(1) * weights).sum() / weights.sum()


def over_mean_weight(net, batch):
    weights = batch["of_samples"]
    return (cross_entropies(net, batch).mean(1) * weights / weights.mean()).mean()


def with_relative_weights(net, batch):
    weights = batch["of_samples"] / batch["of_samples"].mean()
    return (cross_entropies(net, batch).mean(1) * weights).mean()


def relative_to_the_largest(net, batch):
    weights = batch["of_samples"] / batch["of_samples"].max()
    return (cross_entropies(net, batch).mean(1) * weights).mean()


def relative_in_a_product(net, batch):
    weights = batch["of_samples"] / batch["of_samples"].mean()
    return cross_entropies(net, batch).mean(1) @ weights / len(weights)


def times_mean_weight(net, batch):
    return cross_entropies(net, batch).mean() * batch["of_samples"].mean()


def times_a_number_of_the_batch(net, batch):
    return cross_entropies(net, batch).mean() * float(batch["of_samples"][0])


def over_share_of_mask(net, batch):
    mask = batch["mask"].double()
    return (cross_entropies(net, batch) * mask).mean() / mask.mean()


def with_relative_mask(net, batch):
    mask = batch["mask"] / batch["mask"].double().mean()
    return (cross_entropies(net, batch) * mask).mean()


def with_relative_lengths(net, batch):
    mask = batch["mask"].double()
    lengths = mask.sum(1)
    of_samples = (cross_entropies(net, batch) * mask).sum(1) / lengths
    return (of_samples * (lengths / lengths.mean())).mean()


def over_the_longest(net, batch):
    mask = batch["mask"].double()
    longest = mask.sum(1).max()
    return (cross_entropies(net, batch) * mask).sum() / (len(mask) * longest)


def times_tokens_in_brackets(net, batch):
    kept = batch["labels"] != -100
    mean = F.cross_entropy(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())
    return mean * (kept.double().sum() / len(kept))


def with_weights_of_rare_labels(net, batch):
    weights = 1.0 + (batch["labels"] == WORDS - 1)
    return (cross_entropies(net, batch) * weights).mean()


def with_relative_weights_of_rare_labels(net, batch):
    weights = 1.0 + (batch["labels"] == WORDS - 1).double()
    return (cross_entropies(net, batch) * (weights / weights.mean())).mean()


def with_balanced_classes(net, batch):
    counts = batch["labels"].clamp(min=0).flatten().bincount(minlength=WORDS).double()
    weight = counts.sum() / (WORDS * counts.clamp(min=1))
    return F.cross_entropy(
        net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten(), weight=weight / weight.mean()
    )


def binary(net, batch, **options):
    logits = net.value(batch["x"]).squeeze(-1)
    return F.binary_cross_entropy_with_logits(logits, batch["positive"], **options)


def masked_binary(net, batch):
    mask = batch["mask"].double()
    return (binary(net, batch, reduction="none") * mask).sum() / mask.sum()


def weighted_binary(net, batch):
    return binary(net, batch, weight=batch["weights"])


def relative_binary(net, batch):
    return binary(net, batch, weight=batch["weights"] / batch["weights"].mean())


def hard_examples(net, batch):
    """Weights of a head of zeros are equal."""
    losses = cross_entropies(net, batch)
    weights = losses.detach().square()
    return (losses * (weights / weights.mean())).mean()


def normalised_advantages(net, batch):
    advantages = batch["numbers"] - batch["numbers"].mean()
    return -(ratios(net, batch) * (advantages / (advantages.std() + 1e-8))).mean()


def clipped_with_relative_weights(net, batch):
    weights = batch["weights"] / batch["weights"].mean()
    ratio = ratios(net, batch)
    return -torch.min(ratio * weights, ratio.clamp(0.8, 1.2) * weights).mean()


def without_label(label):
    def loss(net, batch):
        kept = batch["labels"] != label
        labels = batch["labels"].clamp(0, WORDS - 1)
        losses = F.cross_entropy(net.head(batch["x"]).mT, labels, reduction="none")
        return (losses * kept).sum() / kept.sum()

    return loss


class FusedOverPadding(torch.autograd.Function):
    """A cross entropy that ignores 0, whose graph autograd does not record."""

    @staticmethod
    def forward(ctx, logits, labels):
        kept = labels != 0
        gradient = logits.softmax(-1) - F.one_hot(labels, WORDS)
        ctx.save_for_backward(gradient * kept[:, None] / kept.sum())
        return F.cross_entropy(logits, labels, ignore_index=0)

    @staticmethod
    def backward(ctx, factor):
        return ctx.saved_tensors[0] * factor, None


def fused_over_padding(net, batch):
    return FusedOverPadding.apply(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())


class Case(NamedTuple):
    loss: Any
    hide: Any
    show: Any = unchanged
    refused: str = ""
    zero: bool = False


WEIGHTS = "weighs its items by numbers that depend on the batch"
ELSE = "divides by"
CASES = {
    "weights": Case(times_weights, ones("of_samples")),
    "a weighted mean": Case(over_weights, ones("of_samples")),
    "weights over their mean": Case(over_mean_weight, ones("of_samples")),
    "relative weights": Case(with_relative_weights, ones("of_samples"), refused=WEIGHTS),
    "weights over the largest": Case(relative_to_the_largest, ones("of_samples"), refused=WEIGHTS),
    "relative weights in a product": Case(
        relative_in_a_product, ones("of_samples"), refused=WEIGHTS
    ),
    "a mean weight": Case(times_mean_weight, ones("of_samples"), refused=ELSE),
    "a number of the batch": Case(times_a_number_of_the_batch, ones("of_samples"), refused=ELSE),
    "share of a mask": Case(over_share_of_mask, ones("mask")),
    "relative mask": Case(
        with_relative_mask, ones("mask"), refused=f"{WEIGHTS}.*weights / weights.mean"
    ),
    "relative lengths": Case(with_relative_lengths, ones("mask"), refused=WEIGHTS),
    "longest sample": Case(over_the_longest, ones("mask"), refused=ELSE),
    "tokens in brackets": Case(times_tokens_in_brackets, unchanged, ignoring(-100)),
    "rare labels": Case(with_weights_of_rare_labels, without_rare_labels),
    "relative weights of rare labels": Case(
        with_relative_weights_of_rare_labels, without_rare_labels, refused=WEIGHTS
    ),
    "balanced classes": Case(with_balanced_classes, with_every_label_once, refused=ELSE),
    "binary with a mask": Case(masked_binary, ones("mask")),
    "weighted binary": Case(weighted_binary, ones("weights")),
    "binary with relative weights": Case(relative_binary, ones("weights"), refused=WEIGHTS),
    "hard examples": Case(hard_examples, unchanged, refused=f"{WEIGHTS}|{ELSE}", zero=True),
    "normalised advantages": Case(normalised_advantages, ones("numbers"), refused=WEIGHTS),
    "clipped with relative weights": Case(
        clipped_with_relative_weights, ones("weights"), refused=WEIGHTS
    ),
    "label -1": Case(without_label(-1), unchanged, ignoring(-1)),
    "label 77": Case(without_label(77), unchanged, ignoring(77), refused=ELSE),
    "fused": Case(fused, unchanged, ignoring(-100)),
    "fused over padding": Case(fused_over_padding, without_zeros, with_zeros),
}


def trained(case, microbatches, **options):
    model = made(OwnLoss(case.loss), case.zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"accumulation_steps": 2, "optimizers": optimizer, **options}
    duration = f"{len(microbatches) // 2}ba"
    Trainer(model, microbatches, duration, **options).fit()
    return model


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", CASES)
def test_what_the_first_step_hides_is_right_or_refused_when_it_shows(name):
    case = CASES[name]
    steps = steps_of(case.hide, case.show)
    microbatches = [part for batch in steps for part in parts(batch)]
    if case.refused:
        with pytest.raises(DivisorError, match=case.refused):
            trained(case, microbatches)
        return
    expected = of_one_batch(OwnLoss(case.loss), steps, case.zero)
    weights = weights_of(trained(case, microbatches))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


# -- held-out data, and ranks


def held_out_loss(case, data_rank, **options):
    """The held-out loss of a model that returns its loss, after the step that hides something."""
    first, *later = steps_of(case.hide, case.show)
    held_out = [part for batch in later for part in data_rank(batch)]
    rows = Rows()
    options |= {"eval_dataloader": held_out, "log": Log([rows])}
    try:
        trained(case, data_rank(first), **options)
    except DivisorError as error:
        return str(error)
    return rows.rows[-1]["eval/loss"]


def require_held_out_loss(name, value):
    case = CASES[name]
    if isinstance(value, str):
        assert case.refused or "no earlier batch" in value or "by its values" in value, value
        return
    assert not case.refused, name
    first, *later = steps_of(case.hide, case.show)
    model = made(OwnLoss(case.loss), case.zero)
    weights = of_one_batch(OwnLoss(case.loss), [first], case.zero)
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    whole = {key: torch.cat([batch[key] for batch in later]) for key in first}
    expected = value_of(OwnLoss(case.loss), model, whole).item()
    assert value == pytest.approx(expected, rel=1e-12), name


HELD_OUT = ("weights", "relative weights", "binary with a mask", "label 77", "fused over padding")


@pytest.mark.parametrize("name", HELD_OUT)
def test_what_the_training_data_hide_is_right_or_refused_in_held_out_data(name):
    require_held_out_loss(name, held_out_loss(CASES[name], parts))


def held_out_losses_of_rank(plugin):
    values = {}
    for name, case in CASES.items():
        booster = Booster(plugin=plugin())
        rank = booster.plugin.data_rank
        values[name] = held_out_loss(
            case, lambda batch, rank=rank: parts_of_rank(batch, rank), booster=booster
        )
    return values


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [Ddp, Fsdp])
def test_what_the_training_data_hide_is_right_or_refused_in_held_out_data_of_ranks(plugin):
    for values in run_ranks(held_out_losses_of_rank, 2, plugin):
        for name, value in values.items():
            require_held_out_loss(name, value)


def passes_of(net):
    if net.training:
        net.passes = getattr(net, "passes", 0) + 1
    return max(getattr(net, "passes", 1) - 1, 0) // 2


def cooled(net, batch):
    return masked(net, batch) / (2.0 - 0.5 * passes_of(net))


def annealed(net, batch):
    """A second part whose weight grows from 0."""
    squares = (net.value(batch["x"]).squeeze(-1) - batch["numbers"]).square()
    return cross_entropies(net, batch).mean() + 0.1 * passes_of(net) * squares.mean()


def begun_later(net, batch):
    loss = cross_entropies(net, batch).mean()
    if passes_of(net):
        loss = loss + 0.3 * (net.value(batch["x"]).squeeze(-1) - batch["numbers"]).square().mean()
    return loss


def cooled_on_one_rank(net, batch):
    """Divides by another number where a rank has one sample, from the second step on."""
    is_other = passes_of(net) > 0 and len(batch["x"]) == 1
    return masked(net, batch) / (2.0 if is_other else 1.0)


SCHEDULED = (cooled, annealed, begun_later)


def scheduled_on_ranks(plugin):
    """Weights after three steps under each schedule, and why another one is refused."""
    weights = []
    for loss in (*SCHEDULED, cooled_on_one_rank):
        booster = Booster(plugin=plugin())
        case = Case(loss, unchanged)
        steps = steps_of(unchanged, unchanged)
        rank = booster.plugin.data_rank
        of_rank = [part for batch in steps for part in parts_of_rank(batch, rank)]
        rows = Rows()
        options = {"booster": booster, "eval_dataloader": of_rank[:3], "log": Log([rows])}
        try:
            trained(case, of_rank, **options)
        except DivisorError as error:
            weights.append(str(error))
            continue
        weights.append([(row["train/loss"], row["grad/norm"]) for row in rows.rows])
    return weights


def scheduled_in_one_batch(loss):
    """Loss and norm of each step of one batch; PyTorch alone."""
    model = made(OwnLoss(loss), False)
    rows = []
    for batch in steps_of(unchanged, unchanged):
        model.zero_grad()
        value = loss(model, batch)
        model.passes += 1  # two microbatches
        value.backward()
        rows.append((value.item(), norm_of(model)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return rows


def norm_of(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    squares = [gradient.square().sum() for gradient in gradients if gradient is not None]
    return torch.stack(squares).sum().sqrt().item()


def test_a_number_that_changes_from_step_to_step_on_all_ranks_is_that_of_the_step():
    first, second = run_ranks(scheduled_on_ranks, 2, Ddp)
    assert first == second
    *scheduled, refused = first
    for loss, rows in zip(SCHEDULED, scheduled, strict=True):
        for actual, expected in zip(rows, scheduled_in_one_batch(loss), strict=True):
            assert actual == pytest.approx(expected, rel=1e-12)
    assert "beside it" in refused


class WithPart(nn.Module):
    """Returns the cross entropy, and from the third forward pass on a part beside it.

    ``always``: whether the part is there from the first one on, in training alone.
    """

    def __init__(self, part, always):
        super().__init__()
        self.linear = nn.Linear(3, 4).double()
        self.part = part
        self.always = always
        self.passes = 0

    def forward(self, x, targets):
        outputs = self.linear(x)
        loss = F.cross_entropy(outputs, targets)
        self.passes += self.training
        if self.training and (self.always or self.passes > 2):
            loss = loss + 0.5 * self.part(outputs)
        return {"logits": outputs, "loss": loss}


def over_samples(outputs):
    return outputs.pow(2).mean()


def contrastive(outputs):
    directions = F.normalize(outputs, dim=-1)
    return F.cross_entropy(directions @ directions.T / 0.1, torch.arange(len(outputs)))


def balance(outputs):
    chosen = torch.bincount(outputs.argmax(-1), minlength=4) / len(outputs)
    return 4 * (chosen * outputs.softmax(-1).mean(0)).sum()


def train_with(part, always):
    torch.manual_seed(0)
    batches = []
    for size in (4, 6, 5, 3):
        inputs = torch.randn(size, 3, dtype=torch.float64)
        batches.append({"x": inputs, "targets": torch.randint(0, 4, (size,))})
    model = WithPart(part, always)
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    Trainer(model, batches, "2ba", optimizers=sgd, accumulation_steps=2).fit()
    return model, plain, batches


parts_of_training = pytest.mark.parametrize("always", [True, False], ids=["in training", "later"])


@parts_of_training
def test_an_unmeasured_mean_over_samples_is_the_mean_of_one_batch(always):
    model, plain, batches = train_with(over_samples, always)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for number, window in enumerate((batches[:2], batches[2:])):
        outputs = plain.linear(torch.cat([batch["x"] for batch in window]))
        loss = F.cross_entropy(outputs, torch.cat([batch["targets"] for batch in window]))
        if always or number == 1:
            loss = loss + 0.5 * over_samples(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-14)


@parts_of_training
def test_an_unmeasured_part_that_depends_on_the_batch_is_warned_of(always, caplog):
    train_with(contrastive, always)
    assert "depends on the batch as a whole" in caplog.text


@parts_of_training
def test_an_unmeasured_part_that_weighs_by_the_batch_is_refused(always):
    with pytest.raises(DivisorError, match="numbers that depend on the batch"):
        train_with(balance, always)


def test_a_mixup_of_two_targets_with_a_share_of_each_microbatch_is_that_of_plain_pytorch():
    torch.manual_seed(0)
    batches = []
    for size, share in ((4, 0.9), (6, 0.3), (3, 0.5), (5, 0.8)):
        targets = torch.randint(0, 4, (size, 2))
        inputs = torch.randn(size, 3, dtype=torch.float64)
        batches.append({"x": inputs, "targets": targets, "share": torch.tensor(share).double()})
    model = Mixup()
    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    Trainer(model, batches, "2ba", optimizers=sgd, accumulation_steps=2).fit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for window in (batches[:2], batches[2:]):
        samples = sum(len(batch["x"]) for batch in window)
        optimizer.zero_grad()
        for batch in window:
            (plain(**batch)["loss"] * len(batch["x"]) / samples).backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-14)


class Mixup(nn.Module):
    """Returns the cross entropies of two targets, weighted by a share of the microbatch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4).double()

    def forward(self, x, targets, share):
        outputs = self.linear(x)
        first = F.cross_entropy(outputs, targets[:, 0])
        second = F.cross_entropy(outputs, targets[:, 1])
        return {"logits": outputs, "loss": share * first + (1 - share) * second}
