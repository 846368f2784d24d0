"""Losses that users write by hand are those of one batch, or are refused.

The reference is the loss alone, of all samples of a step in one batch, in float64. Each step has
two microbatches, of three and five samples. Nothing is left out in the first step.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Booster, Log, Trainer
from runner.booster.batch import BatchError
from runner.booster.loss import DivisorError
from tests.distributed.cases import Ddp, Fsdp, Zero
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SIZES = (3, 5)
STEPS = 2
LENGTH = 7
WORDS = 6
WIDTH = 4
SAMPLES = sum(SIZES)


class Net(nn.Module):
    """A linear layer, and a loss of its own."""

    def __init__(self, loss, zero=False):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)
        self.value = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.zeros(2))
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        self.own_loss = loss

    def forward(self, batch):
        return {"loss": self.own_loss(self, batch)}


class Whole(Net):
    """The same loss as a method of outputs and batch."""

    def forward(self, batch):
        return self.head(batch["x"])

    def loss(self, outputs, batch):
        return self.own_loss(lambda x: outputs, batch)


class Scalars(Whole):
    """Its forward returns means, which its method adds up."""

    def forward(self, batch):
        outputs = self.head(batch["x"])
        error = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
        return {"error": error, "divergence": 0.1 * outputs.square().mean()}


def batches(seed=0, holes=True):
    """A batch of all samples of each step: words, numbers, masks and weights."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for step in range(STEPS):
        x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
        numbers = torch.randn(SAMPLES, LENGTH, generator=generator, dtype=torch.float64)
        weights = torch.rand(SAMPLES, LENGTH, generator=generator, dtype=torch.float64)
        left_out = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6
        left_out[: SIZES[0]] &= torch.rand(SIZES[0], LENGTH, generator=generator) < 0.3
        left_out[:, 0] = False
        left_out &= holes and step > 0
        steps.append(
            {
                "x": x,
                "labels": labels,
                "numbers": numbers,
                "weights": weights,
                "mask": ~left_out,
                "positive": (labels > 3).double(),
            }
        )
    return steps


def cross_entropies(net, batch):
    return F.cross_entropy(net.head(batch["x"]).mT, batch["labels"].clamp(min=0), reduction="none")


def masked(net, batch):
    mask = batch["mask"].double()
    return (cross_entropies(net, batch) * mask).sum() / mask.sum().clamp(min=1)


def selected(net, batch):
    kept = batch["mask"]
    return F.cross_entropy(net.head(batch["x"])[kept], batch["labels"][kept])


def normalised_inputs(net, batch):
    inputs = batch["x"] - batch["x"].mean((0, 1))
    return F.cross_entropy(net.head(inputs).flatten(0, 1), batch["labels"].flatten())


def median_of_the_batch(net, batch):
    outputs = net.value(batch["x"])[..., 0]
    median = float((outputs - batch["numbers"]).detach().abs().median())
    return F.huber_loss(outputs, batch["numbers"], delta=median)


def selected_in_method(outputs, batch):
    kept = batch["mask"]
    return F.cross_entropy(outputs(None)[kept], batch["labels"][kept]).reshape(1, 1)


def ratios(net, batch):
    chosen = net.head(batch["x"]).log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    return torch.exp(chosen - chosen.detach() + 0.1 * batch["numbers"])


def clipped_objective(net, batch):
    ratio = ratios(net, batch)
    advantage = batch["numbers"]
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def with_an_epsilon(net, batch):
    mask = batch["mask"].double()
    return (cross_entropies(net, batch) * mask).sum() / (mask.sum() + 1e-8)


class Fused(torch.autograd.Function):
    """A cross entropy whose graph autograd does not record, as that of a fused kernel."""

    @staticmethod
    def forward(ctx, logits, labels):
        kept = labels != -100
        gradient = logits.softmax(-1) - F.one_hot(labels.clamp(min=0), WORDS)
        ctx.save_for_backward(gradient * kept[:, None] / kept.sum())
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx, factor):
        return ctx.saved_tensors[0] * factor, None


def fused(net, batch):
    return Fused.apply(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def grpo(net, batch):
    """Mean over samples of means over tokens, as in GRPO."""
    mask = batch["mask"].double()
    of_samples = (clipped_objective(net, batch) * mask).sum(1) / mask.sum(1)
    return of_samples.mean()


def dapo(net, batch):
    """Mean over the tokens of all samples, as in DAPO."""
    mask = batch["mask"].double()
    return (clipped_objective(net, batch) * mask).sum() / mask.sum()


def distillation(net, batch):
    student = F.log_softmax(net.head(batch["x"]) / 2.0, dim=-1)
    teacher = F.softmax(batch["x"].repeat(1, 1, 2)[..., :WORDS], dim=-1)
    mask = batch["mask"]
    divergence = F.kl_div(student, teacher, reduction="none").sum(-1)
    return 4.0 * (divergence * mask).sum() / mask.sum()


def distillation_and_labels(net, batch):
    """Cross entropy of every word, and a divergence that divides by the samples."""
    student = F.log_softmax(net.head(batch["x"]), dim=-1)
    teacher = F.softmax(batch["x"].repeat(1, 1, 2)[..., :WORDS], dim=-1)
    hard = F.cross_entropy(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())
    return 0.3 * hard + 0.7 * F.kl_div(student, teacher, reduction="batchmean")


def focal(net, batch):
    logits = net.value(batch["x"]).squeeze(-1)
    targets = batch["positive"]
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return ((1 - (-losses).exp()).square() * losses).sum() / targets.sum().clamp(min=1.0)


def smoothed(net, batch):
    logs = net.head(batch["x"]).log_softmax(-1)
    right = -logs.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    kept = batch["labels"] != -100
    return (((0.9 * right - 0.1 * logs.mean(-1)) * kept).sum()) / kept.sum()


def spans(net, batch):
    outputs = net.head(batch["x"]).mT
    starts = batch["labels"][:, 0]
    ends = batch["labels"][:, 1]
    return (F.cross_entropy(outputs[:, 0], starts) + F.cross_entropy(outputs[:, 1], ends)) / 2


def padded(net, batch):
    """Sequence to sequence: inputs are the words before, 0 is padding."""
    logits = net.head(batch["x"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=0)


def padded_by_hand(net, batch):
    words = batch["labels"][:, 1:].flatten()
    losses = F.cross_entropy(net.head(batch["x"])[:, :-1].flatten(0, 1), words, reduction="none")
    kept = words.ne(0)
    return losses.masked_select(kept).mean()


def token_weighted(net, batch):
    weights = batch["weights"] * batch["mask"]
    return (cross_entropies(net, batch) * batch["token_weights"]).sum() / weights.sum()


def detected(net, batch):
    """A sum of terms, each divided by the positive ones, as detectors have."""
    logits = net.head(batch["x"])[..., 0]
    numbers = net.value(batch["x"]).squeeze(-1)
    positive = batch["positive"]
    count = positive.sum().clamp(min=1.0)
    scores = F.binary_cross_entropy_with_logits(logits, positive, reduction="sum") / count
    boxes = (F.smooth_l1_loss(numbers, batch["numbers"], reduction="none") * positive).sum()
    return scores + 2.0 * boxes / count


def contrastive(net, batch):
    pooled = F.normalize(net.head(batch["x"]).mean(1), dim=-1)
    views = F.normalize(net.head(batch["x"].roll(1, 1) + 0.1).mean(1), dim=-1)
    return F.cross_entropy(5 * pooled @ views.T, torch.arange(len(pooled)))


def spread(net, batch):
    """Standard deviations over the batch, as in VICReg: those of one sample are NaN."""
    pooled = net.head(batch["x"]).mean(1)
    return F.relu(1 - pooled.var(0).clamp(min=1e-12).sqrt()).mean() + pooled.square().mean()


def balanced(net, batch):
    """Cross entropy, and shares of experts over the whole batch."""
    shares = net.head(batch["x"]).softmax(-1).flatten(0, 1).mean(0)
    return masked(net, batch) + WORDS * shares.square().sum()


def triplets(net, batch):
    anchor, near, far = net.head(batch["x"])[:, :3].unbind(1)
    return F.triplet_margin_loss(anchor, near, far)


def variational(net, batch):
    mean, log_variance = net.head(batch["x"])[..., :4].chunk(2, -1)
    noise = torch.randn_like(mean) if net.training and batch.get("noise") is not None else 0.1
    decoded = (mean + noise * (0.5 * log_variance).exp()).sum(-1)
    error = F.mse_loss(decoded, batch["numbers"], reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (error + divergence) / len(batch["x"])


def dice(net, batch):
    share = net.value(batch["x"]).squeeze(-1).sigmoid()
    overlap = 2 * (share * batch["positive"]).sum() + 1
    return 1 - overlap / (share.sum() + batch["positive"].sum() + 1)


def dice_of_samples(net, batch):
    share = net.value(batch["x"]).squeeze(-1).sigmoid()
    overlap = 2 * (share * batch["positive"]).sum(1) + 1
    return (1 - overlap / (share.sum(1) + batch["positive"].sum(1) + 1)).mean()


def rmse(net, batch):
    return F.mse_loss(net.value(batch["x"]).squeeze(-1), batch["numbers"]).sqrt()


def two_masks(net, batch):
    kept = batch["mask"]
    elsewhere = batch["other_mask"]
    numbers = (net.value(batch["x"]).squeeze(-1) - batch["numbers"]).square()
    return masked(net, batch) + (numbers * elsewhere).sum() / elsewhere.sum() + 0.0 * kept.sum()


def nano_gpt(net, batch):
    logits = net.head(batch["x"])
    labels = batch["labels"]
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), ignore_index=-1)


def penalised(net, batch):
    squares = sum(parameter.square().sum() for parameter in net.parameters())
    return nano_gpt(net, batch) + 1e-2 * squares


def with_norms_of_weights(net, batch):
    return nano_gpt(net, batch) + 1e-2 * sum(p.norm() for p in net.head.parameters())


def norm_of_a_product(net, batch):
    """A product of a weight and samples is no penalty of the weight."""
    return (batch["x"] @ net.head.weight.T).norm()


def several_tokens(net, batch):
    """The next word and the one after it."""
    logits = net.head(batch["x"])
    labels = batch["labels"]
    first = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return first + 0.3 * F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())


def learned_weights(net, batch):
    """Two tasks, weighted by their uncertainty."""
    numbers = F.mse_loss(net.value(batch["x"]).squeeze(-1), batch["numbers"])
    labels = F.cross_entropy(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())
    first, second = net.scale
    return torch.exp(-first) * labels + first + torch.exp(-second) * numbers + second


def vector_of_learned_weights(net, batch):
    numbers = F.mse_loss(net.value(batch["x"]).squeeze(-1), batch["numbers"])
    labels = F.cross_entropy(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())
    return (torch.exp(-net.scale) * torch.stack([labels, numbers]) + net.scale).sum()


def looped(net, batch):
    """A mean over the kept words of each sample, in a loop over samples."""
    total = 0.0
    for x, labels, mask in zip(batch["x"], batch["labels"], batch["mask"], strict=True):
        total = total + F.cross_entropy(net.head(x)[mask], labels[mask])
    return total / len(batch["x"])


def weights_of_the_batch(net, batch):
    counts = batch["labels"].flatten().bincount(minlength=WORDS).clamp(min=1)
    weight = counts.sum() / counts
    labels = batch["labels"].flatten()
    return F.cross_entropy(net.head(batch["x"]).flatten(0, 1), labels, weight=weight.double())


def weights_of_classes(net, batch):
    weight = torch.arange(1.0, WORDS + 1, dtype=torch.float64)
    labels = batch["labels"].flatten()
    return F.cross_entropy(net.head(batch["x"]).flatten(0, 1), labels, weight=weight)


def summed(net, batch):
    return (cross_entropies(net, batch) * batch["mask"]).sum()


def without_nan(net, batch):
    targets = batch["numbers"]
    kept = ~targets.isnan()
    return F.mse_loss(net.value(batch["x"]).squeeze(-1)[kept], targets[kept])


def normalised_weights(net, batch):
    weights = batch["weights"] / batch["weights"].sum()
    return (cross_entropies(net, batch) * weights).sum()


def times_tokens(net, batch):
    kept = batch["labels"] != -100
    mean = F.cross_entropy(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())
    return mean * kept.sum() / len(kept)


def squares_of_samples(net, batch):
    return 0.5 * F.mse_loss(net.value(batch["x"])[..., 0], batch["numbers"]) * len(batch["x"])


def scaled_by_the_batch(net, batch):
    squares = F.mse_loss(net.value(batch["x"])[..., 0], batch["numbers"])
    return squares * (batch["numbers"] > 0).double().mean()


def balanced_positives(net, batch):
    positive = batch["positive"]
    weight = (positive == 0).sum() / positive.sum()
    values = net.value(batch["x"])[..., 0]
    return F.binary_cross_entropy_with_logits(values, positive, pos_weight=weight)


def with_a_large_epsilon(net, batch):
    mask = batch["mask"].double()
    loss = torch.zeros(1, dtype=torch.float64)
    loss += (cross_entropies(net, batch) * mask).sum() / (mask.sum() + 1e-3)
    return loss


def weights_in_a_mask(net, batch):
    weights = batch["weights"] * batch["mask"]
    return (cross_entropies(net, batch) * weights).sum() / (weights.sum() + 1e-6)


def quotients_of_learned_numbers(net, batch):
    """Two tasks, divided by learned variances."""
    first, second = (2 * net.scale.exp().square()).unbind()
    numbers = F.mse_loss(net.value(batch["x"]).squeeze(-1), batch["numbers"])
    return cross_entropies(net, batch).mean() / first + numbers / second + net.scale.sum()


def cooled(net, batch):
    """A mean divided by a temperature that falls from step to step."""
    if net.training:
        net.passes = getattr(net, "passes", 0) + 1
    step = max(getattr(net, "passes", 1) - 1, 0) // 2
    return masked(net, batch) / (2.0 - 0.5 * step)


def counted_in_forward(net, batch):
    """A weight of a second term that grows with the forward passes, which are counted."""
    net.passes = getattr(net, "passes", 0) + 1
    numbers = (net.value(batch["x"]).squeeze(-1) - batch["numbers"]).square().mean()
    return cross_entropies(net, batch).mean() + 0.1 * ((net.passes - 1) // 2) * numbers


def penalty_of_outputs_in_training(net, batch):
    loss = F.cross_entropy(net.head(batch["x"]).flatten(0, 1), batch["labels"].flatten())
    if net.training:
        loss = loss + 0.5 * net.value(batch["x"]).square().mean()
    return loss


def fewer_labels_in_training(net, batch):
    labels = batch["labels"]
    if net.training:
        labels = labels.masked_fill(batch["weights"] < 0.3, -100)
    return F.cross_entropy(net.head(batch["x"]).flatten(0, 1), labels.flatten())


def a_mean_and_a_sum(net, batch):
    """A mean of squares, and a divergence that nothing divides."""
    mean, log_variance = net.head(batch["x"])[..., :4].chunk(2, -1)
    error = F.mse_loss(net.value(batch["x"]).squeeze(-1), batch["numbers"])
    return error - 1e-2 * (1 + log_variance - mean.square() - log_variance.exp()).sum()


def free_bits(net, batch):
    squares = net.head(batch["x"]).square().mean()
    return masked(net, batch) + squares.clamp(min=100.0)


def decorrelated(net, batch):
    """Products of features over the batch, as in Barlow Twins."""
    pooled = net.head(batch["x"]).mean(1)
    return (pooled.T @ pooled / len(pooled) - torch.eye(WORDS)).square().sum()


class FusedSquares(torch.autograd.Function):
    """A mean over targets that are not NaN, whose graph autograd does not record."""

    @staticmethod
    def forward(ctx, outputs, targets):
        kept = ~targets.isnan()
        error = torch.where(kept, outputs - targets.nan_to_num(), 0.0)
        ctx.save_for_backward(2 * error / kept.sum())
        return error.square().sum() / kept.sum()

    @staticmethod
    def backward(ctx, factor):
        return ctx.saved_tensors[0] * factor, None


def fused_squares(net, batch):
    return FusedSquares.apply(net.value(batch["x"]).squeeze(-1), batch["numbers"])


def scalars_of_forward(outputs, batch):
    return outputs(None)["error"] + outputs(None)["divergence"]


def ignoring(label):
    def change(batch):
        return {**batch, "labels": batch["labels"].masked_fill(~batch["mask"], label)}

    return change


def ignoring_alone(label):
    """Another label takes the place of this one first."""

    def change(batch):
        labels = batch["labels"].masked_fill(batch["labels"] == label, label + 1)
        return {**batch, "labels": labels.masked_fill(~batch["mask"], label)}

    return change


def with_token_weights(batch):
    weights = batch["weights"] * batch["mask"]
    return {**batch, "token_weights": weights}


def with_nan_at_once(batch):
    """Targets are NaN in the first step too: the graph does not tell it."""
    left_out = batch["weights"] < 0.3
    left_out[:, 0] = False
    return {**batch, "numbers": batch["numbers"].masked_fill(left_out, math.nan)}


def with_nan(batch):
    return {**batch, "numbers": batch["numbers"].masked_fill(~batch["mask"], math.nan)}


def with_two_masks(batch):
    return {**batch, "other_mask": batch["mask"].roll(3, 1) & (batch["numbers"] < 1)}


def first_positive(batch):
    batch["positive"][0] = 1
    return batch


def unchanged(batch):
    return batch


class Case(NamedTuple):
    loss: Any
    change: Any = unchanged
    refused: str = ""
    warned: str = ""
    holes: bool = True
    kind: Any = Net


ELSE = "divides by"
OF_BATCH = "depends on the batch as a whole"
WEIGHTS = "weighs its items by numbers that depend on the batch"
CASES = {
    "masked cross entropy": Case(masked),
    "selected cross entropy": Case(selected),
    "inputs less their mean": Case(normalised_inputs, ignoring(-100), warned=OF_BATCH),
    "a limit of the batch": Case(median_of_the_batch, warned=OF_BATCH),
    "selected in a method, of shape [1, 1]": Case(selected_in_method, kind=Whole),
    "fused": Case(fused, ignoring(-100), warned="its graph ends in"),
    "a mask and an epsilon": Case(with_an_epsilon),
    "grpo": Case(grpo),
    "dapo": Case(dapo),
    "distillation with a mask": Case(distillation),
    "distillation and labels": Case(distillation_and_labels),
    "focal": Case(focal),
    "smoothed": Case(smoothed, ignoring(-100)),
    "spans": Case(spans),
    "padding 0": Case(padded, ignoring_alone(0)),
    "padding 0 by hand": Case(padded_by_hand, ignoring_alone(0)),
    "padding 1 in the labels alone": Case(padded_by_hand, ignoring(0)),
    "token weights": Case(token_weighted, with_token_weights),
    "detection": Case(detected),
    "contrastive": Case(contrastive, warned=OF_BATCH),
    "spread": Case(spread, warned=OF_BATCH),
    "balanced experts": Case(balanced, warned=OF_BATCH),
    "triplets": Case(triplets),
    "variational": Case(variational),
    "dice": Case(dice, refused='no mean over items.*loss.items=none.*items="none"'),
    "dice of samples": Case(dice_of_samples),
    "rmse": Case(rmse, refused="sqrt of what it has summed.*loss.items=none"),
    "two masks": Case(two_masks, with_two_masks, refused=ELSE),
    "nanoGPT": Case(nano_gpt, ignoring(-1)),
    "nanoGPT with a penalty": Case(penalised, ignoring(-1)),
    "nanoGPT with norms of weights": Case(with_norms_of_weights, ignoring(-1)),
    "the norm of a product": Case(norm_of_a_product, refused="vectornorm of what it has summed"),
    "several tokens": Case(several_tokens, holes=False),
    "several tokens that are ignored later": Case(several_tokens, ignoring(-100), refused=ELSE),
    "learned weights of tasks": Case(learned_weights),
    "a vector of learned weights": Case(vector_of_learned_weights),
    "a loop over samples": Case(looped),
    "class weights of the batch": Case(weights_of_the_batch, refused=ELSE),
    "class weights": Case(weights_of_classes),
    "a sum": Case(summed),
    "targets that are NaN": Case(without_nan, with_nan),
    "a mean of torch times tokens": Case(times_tokens, ignoring(-100)),
    "half the squares of samples": Case(squares_of_samples),
    "a mean of torch times a share": Case(scaled_by_the_batch, refused=ELSE),
    "weights of the positives of a batch": Case(
        balanced_positives, first_positive, refused=WEIGHTS
    ),
    "normalised weights": Case(
        normalised_weights, refused="no number of items that the batch holds"
    ),
    "a mask and a large epsilon, of shape [1]": Case(with_a_large_epsilon),
    "weights in a mask": Case(weights_in_a_mask),
    "quotients of learned numbers": Case(quotients_of_learned_numbers),
    "a penalty in training alone": Case(
        penalty_of_outputs_in_training, ignoring(-100), refused=ELSE
    ),
    "fewer labels in training": Case(fewer_labels_in_training, refused=ELSE),
    "a mean and a sum": Case(a_mean_and_a_sum, refused=ELSE),
    "free bits": Case(free_bits, refused="it clamps what it has summed"),
    "features of the batch": Case(decorrelated, refused=f"{OF_BATCH}|{ELSE}"),
    "scalars that forward computes": Case(scalars_of_forward, kind=Scalars),
}


def parts(batch):
    """The microbatches of a step."""
    first = {name: tensor[: SIZES[0]] for name, tensor in batch.items()}
    return [first, {name: tensor[SIZES[0] :] for name, tensor in batch.items()}]


def made(case, zero):
    torch.manual_seed(1)
    return case.kind(case.loss, zero).double()


def value_of(case, model, batch):
    """The loss of a batch; PyTorch alone."""
    if issubclass(case.kind, Whole):
        return model.loss(model(batch), batch)
    return case.loss(model, batch)


def of_one_batch(case, steps, zero):
    """Weights after steps of gradient descent on whole batches; PyTorch alone."""
    model = made(case, zero)
    for batch in steps:
        model.zero_grad()
        value_of(case, model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero head"])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_of_ones_own_is_that_of_one_batch_or_refused(name, zero, caplog):
    case = CASES[name]
    steps = [case.change(batch) for batch in batches(holes=case.holes)]
    model = made(case, zero)
    microbatches = [part for batch in steps for part in parts(batch)]
    options = {"accumulation_steps": 2, "optimizers": torch.optim.SGD(model.parameters(), lr=0.01)}
    trainer = Trainer(model, microbatches, f"{STEPS}ba", log=Log([Rows()]), **options)
    if case.refused:
        with pytest.raises(DivisorError, match=case.refused):
            trainer.fit()
        return
    trainer.fit()
    # With a head of zeros each part of a batch has the same loss.
    assert zero or case.warned in caplog.text
    assert case.warned or "divides" not in caplog.text
    if case.warned != OF_BATCH:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(weights, of_one_batch(case, steps, zero), rtol=0, atol=1e-13)


def guarded(net, batch):
    kept = batch["mask"]
    if not kept.any():
        return net.head(batch["x"]).sum() * 0
    return (cross_entropies(net, batch) * kept).sum() / kept.sum()


def guarded_without_a_graph(net, batch):
    if not batch["mask"].any():
        return torch.zeros((), dtype=torch.float64, requires_grad=True)
    return selected(net, batch)


def per_positive(net, batch):
    return cross_entropies(net, batch).sum() / batch["positive"].sum().clamp(min=1)


def per_positive_in_method(outputs, batch):
    losses = F.cross_entropy(outputs(None).mT, batch["labels"], reduction="none")
    return losses.sum() / batch["positive"].sum().clamp(min=1)


def without_labels_at_first(batch, microbatches):
    batch["mask"][: sum(SIZES[:microbatches])] = False


def without_positives_at_first(batch, microbatches):
    batch["positive"][: sum(SIZES[:microbatches])] = 0


def trained(case, steps):
    model = made(case, zero=False)
    microbatches = [part for batch in steps for part in parts(batch)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"accumulation_steps": 2, "optimizers": optimizer}
    Trainer(model, microbatches, f"{len(steps)}ba", **options).fit()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss", [guarded, guarded_without_a_graph])
def test_a_loss_of_0_in_the_first_batches_is_no_sum(loss, microbatches):
    steps = batches()
    case = Case(loss)
    without_labels_at_first(steps[0], microbatches)
    weights = trained(case, steps)
    torch.testing.assert_close(weights, of_one_batch(case, steps, False), rtol=0, atol=1e-13)


def test_a_sample_whose_loss_has_no_graph_tells_nothing():
    steps = batches()
    case = Case(guarded_without_a_graph)
    for batch in steps:
        batch["mask"][0] = False
    weights = trained(case, steps)
    torch.testing.assert_close(weights, of_one_batch(case, steps, False), rtol=0, atol=1e-13)


def require_those_of_one_batch(case, steps):
    weights = trained(case, steps)
    torch.testing.assert_close(weights, of_one_batch(case, steps, False), rtol=0, atol=1e-13)


def test_a_microbatch_without_positives_divides_by_1():
    """As ``clamp(min=1)`` of the number of positives does, where the loss is not 0."""
    without_any, without_first = batches(), batches()
    without_positives_at_first(without_any[0], microbatches=2)
    without_first[1]["positive"][: SIZES[0]] = 0
    for steps in (without_any, without_first):
        require_those_of_one_batch(Case(per_positive), steps)
        require_those_of_one_batch(Case(per_positive_in_method, kind=Whole), steps)


def test_weights_of_a_batch_whose_loss_is_0_are_told_by_the_next():
    steps = batches()
    steps[0]["positive"][:] = 1
    steps[1] = first_positive(steps[1])
    with pytest.raises(DivisorError, match=WEIGHTS):
        trained(Case(balanced_positives), steps)


@pytest.mark.parametrize("loss", [cooled, counted_in_forward])
def test_a_number_that_changes_from_step_to_step_is_that_of_the_step(loss):
    """The reference counts one pass a step, and two passes are counted in a step."""
    steps = batches(holes=loss is cooled)
    weights = trained(Case(loss), steps)

    def reference(net, batch):
        value = loss(net, batch)
        net.passes += 1
        return value

    expected = of_one_batch(Case(reference), steps, False)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


def test_a_microbatch_without_labels_that_has_a_penalty_alone_has_no_weight():
    def loss(outputs, batch):
        mask = batch["mask"]
        losses = F.cross_entropy(outputs(None).mT, batch["labels"], reduction="none") * mask
        penalty = 0.1 * outputs.net.head.weight.square().sum()
        return losses.sum() / mask.sum().clamp(min=1) + penalty

    class WithPenalty(Whole):
        def loss(self, outputs, batch):
            def of(x):
                return outputs

            of.net = self
            return loss(of, batch)

    steps = batches()
    steps[1]["mask"][: SIZES[0]] = False
    require_those_of_one_batch(Case(loss, kind=WithPenalty), steps)


def test_the_mean_of_a_fused_function_is_told_by_the_losses_of_parts(caplog):
    steps = [with_nan_at_once(batch) for batch in batches()]
    require_those_of_one_batch(Case(fused_squares), steps)
    assert "the values that are not NaN of 'numbers'" in caplog.text


def pairs(net, batch):
    values = net.value(batch["x"])[:, 0, 0]
    return -F.logsigmoid(values[::2] - values[1::2]).mean()


def test_pairs_of_samples_are_not_separated():
    x = torch.randn(20, LENGTH, WIDTH, dtype=torch.float64)
    sizes = (2, 6, 8, 4)
    taken = [{"x": part} for part in x.split(sizes)]
    model = made(Case(pairs), zero=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Trainer(model, taken, "2ba", accumulation_steps=2, optimizers=optimizer).fit()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    steps = [{"x": x[:8]}, {"x": x[8:]}]
    expected = of_one_batch(Case(pairs), steps, False)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


def per_hundred(net, batch):
    return cross_entropies(net, batch).sum() / 100


@pytest.mark.parametrize(
    ("loss", "words"),
    [(per_hundred, "that is a constant"), (normalised_weights, "weights")],
)
def test_a_sum_of_samples_of_several_lengths_is_refused_where_parts_cannot_tell(loss, words):
    whole = batches()[0]
    taken = []
    for number, length in enumerate((4, 7)):
        taken.append({name: tensor[number : number + 1, :length] for name, tensor in whole.items()})
    model = made(Case(loss), zero=False)
    with pytest.raises(DivisorError, match=words):
        Trainer(model, taken, "1ba", accumulation_steps=2).fit()


def test_labels_of_minus_one_that_a_model_compares_are_items_of_its_only_microbatch():
    def hinge(net, batch):
        return F.relu(1 - batch["labels"] * net.value(batch["x"])[:, 0, 0]).mean()

    batch = {"x": batches()[0]["x"], "labels": -torch.ones(SAMPLES, dtype=torch.long)}
    model = made(Case(hinge), zero=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Trainer(model, [batch], "1ba", optimizers=optimizer).fit()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    expected = of_one_batch(Case(hinge), [batch], False)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


def without_sevens(outputs, targets):
    kept = targets != 7
    return ((outputs - targets).square() * kept).sum() / kept.sum()


def refusals_of_rank(plugin, trains):
    """Where a batch of rank 1 holds a target that its criterion alone leaves out."""
    booster = Booster(plugin=plugin())
    generator = torch.Generator().manual_seed(booster.plugin.rank)
    model = nn.Linear(3, 2).double()
    taken = []
    for _ in range(3):
        numbers = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        taken.append((numbers[:, :3], numbers[:, 3:]))
    bad = (taken[2][0], taken[2][1].clone())
    if booster.plugin.rank == 1:
        bad[1][0, 0] = 7
    before = model.weight.detach().clone()
    trainer = Trainer(
        model,
        [*taken[:2], bad if trains else taken[2]],
        "3ba",
        eval_dataloader=[taken[0], taken[1] if trains else bad],
        criterion=without_sevens,
        booster=booster,
    )
    with pytest.raises(DivisorError) as refused:
        trainer.fit()
    assert not torch.equal(before, model.weight)  # by the steps before
    return str(refused.value)


def twice_of_nines(outputs, targets):
    kept = targets != 0
    factor = 2 if (targets == 9).any() else 1
    return ((outputs - targets).square() * kept).sum() / (factor * kept.sum())


def refusal_after_a_look(plugin, trains):
    """Where rank 1 divides by twice its items, in a batch after one that tells counts apart."""
    booster = Booster(plugin=plugin())
    generator = torch.Generator().manual_seed(booster.plugin.rank)
    pairs = []
    for _ in range(4):
        numbers = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        pairs.append((numbers[:, :3], numbers[:, 3:]))
    pairs[2][1][0, 0] = 0
    if booster.plugin.rank == 1:
        pairs[2][1].zero_()  # nothing to compare the next one with
        pairs[3][1][0, 0] = 9
    trainer = Trainer(
        nn.Linear(3, 2).double(),
        pairs if trains else pairs[:2],
        "4ba" if trains else "2ba",
        eval_dataloader=None if trains else pairs[2:],
        criterion=twice_of_nines,
        booster=booster,
    )
    with pytest.raises(DivisorError) as refused:
        trainer.fit()
    return str(refused.value)


def refusals_of_each(plugin):
    return [
        refusal(plugin, trains)
        for refusal in (refusals_of_rank, refusal_after_a_look)
        for trains in (True, False)
    ]


def test_all_ranks_end_with_the_refusal_of_one():
    first, second = run_ranks(refusals_of_each, 2, Ddp)
    assert first == second
    assert all("divides by 7 for a batch of 4 samples" in refusal for refusal in first[:2])
    assert all("a loss of 8 items divides by" in refusal for refusal in first[2:])


def test_sums_of_a_mask_in_half_precision_tell_what_was_left_out():
    batch = batches()[1]
    halves = {name: x.bfloat16() if x.is_floating_point() else x for name, x in batch.items()}
    model = made(CASES["masked cross entropy"], zero=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, parts(halves), "1ba", accumulation_steps=2, optimizers=optimizer)
    trainer.fit()
    counted = [trainer.loss.items(part).items for part in parts(halves)]
    assert counted == [int(part["mask"].sum()) for part in parts(halves)]


def test_labels_of_no_class_that_nobody_ignores_are_refused():
    x = torch.randn(2, LENGTH, WIDTH)
    labels = torch.full((2, LENGTH), -1)
    with pytest.raises(BatchError, match=r"label -1 is no class.*ignores -100 alone.*dictionaries"):
        Trainer(nn.Linear(WIDTH, WORDS), [(x, labels)] * 2, "1ba", accumulation_steps=2).fit()


# -- over ranks


def parts_of_rank(batch, rank):
    """The samples of rank 0 or 1 in each microbatch of a step: 1 and 2, or 2 and 3."""
    taken = []
    for part in parts(batch):
        cut = len(part["x"]) // 2
        rows = slice(0, cut) if rank == 0 else slice(cut, None)
        taken.append({name: tensor[rows] for name, tensor in part.items()})
    return taken


def rows_of(name, plugin):
    """Loss and norm of each step on two ranks, and the held-out loss, or why it is refused."""
    case = CASES[name]
    made_plugin = plugin()
    rows = Rows()
    steps = [case.change(batch) for batch in batches(holes=case.holes)]
    model = made(case, zero=False)
    of_rank = [part for batch in steps for part in parts_of_rank(batch, made_plugin.data_rank)]
    held_out = of_rank[: len(of_rank) - made_plugin.data_rank]  # of another length on each rank
    trainer = Trainer(
        model,
        of_rank,
        f"{STEPS}ba",
        eval_dataloader=held_out,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        booster=Booster(plugin=made_plugin),
        accumulation_steps=2,
        log=Log([rows]),
    )
    try:
        trainer.fit()
    except DivisorError as error:
        return str(error)
    return [(row["train/loss"], row["grad/norm"]) for row in rows.rows], rows.rows[-1]["eval/loss"]


def rows_of_each(names, plugin):
    return {name: rows_of(name, plugin) for name in names}


def rows_by_hand(name):
    """The same of one batch, by PyTorch alone."""
    case = CASES[name]
    steps = [case.change(batch) for batch in batches(holes=case.holes)]
    model = made(case, zero=False)
    rows = []
    for batch in steps:
        model.zero_grad()
        loss = (
            model.loss(model(batch), batch)
            if issubclass(case.kind, Whole)
            else case.loss(model, batch)
        )
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        squares = [gradient.square().sum() for gradient in gradients if gradient is not None]
        rows.append((loss.item(), torch.stack(squares).sum().sqrt().item()))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    whole = {key: torch.cat([batch[key] for batch in steps]) for key in steps[0]}
    last = parts_of_rank(steps[-1], 1)[-1]
    seen = {key: tensor[: -len(last["x"])] for key, tensor in whole.items()}
    held_out = (
        model.loss(model(seen), seen) if issubclass(case.kind, Whole) else case.loss(model, seen)
    )
    return rows, held_out.item()


def require_rows(name, found):
    case = CASES[name]
    if isinstance(found, str):
        assert case.refused, (name, found)
        return
    assert not case.refused, name
    if case.warned == OF_BATCH:
        return
    rows, held_out = rows_by_hand(name)
    for actual, expected in zip(found[0], rows, strict=True):
        assert actual == pytest.approx(expected, rel=1e-12), name
    if name not in ("a sum", "half the squares of samples"):  # which is a sum too
        assert found[1] == pytest.approx(held_out, rel=1e-12), name


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [Ddp, Fsdp, Zero])
def test_a_loss_of_ones_own_is_that_of_one_batch_or_refused_on_two_ranks(plugin):
    names = [name for name in CASES if "later" not in name]
    for results in run_ranks(rows_of_each, 2, names, plugin):
        for name, rows in results.items():
            require_rows(name, rows)
