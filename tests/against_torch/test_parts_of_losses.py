"""The parts of a loss, penalties and selections of samples are those of one batch, or are refused.

The reference is PyTorch alone in float64, on all samples of a step in one batch.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Booster, Trainer
from runner.booster.loss import DivisorError
from tests.distributed.cases import Ddp
from tests.ranks import run_ranks

BY_BATCH = "depends on the batch as a whole"
WEIGHTS = "weighs its items by numbers that depend on the batch"
PENALTY = "multiplies a penalty of parameters with a number that depends on the batch"


class Net(nn.Module):
    """A linear layer, and a loss of its own that knows how many batches it has trained on."""

    def __init__(self, loss):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.own_loss = loss
        self.passes = 0

    def forward(self, **batch):
        outputs = self.linear(batch["x"])
        self.passes += self.training
        return {"logits": outputs, "loss": self.own_loss(self, outputs, batch)}


def batches(sizes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    taken = []
    for size in sizes:
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        weights = torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        taken.append(
            {
                "x": x.to(dtype),
                "targets": torch.randint(4, (size,), generator=generator),
                "weights": weights.to(dtype),
                "mask": torch.rand(size, generator=generator) < 0.6,
            }
        )
    return taken


def trained(loss, taken, dtype=torch.float64, **options):
    """The model after steps of two microbatches, and as it was before."""
    torch.manual_seed(0)
    model = Net(loss).to(dtype)
    before = copy.deepcopy(model)
    options = {"accumulation_steps": 2, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = len(taken) // options["accumulation_steps"]
    Trainer(model, taken, f"{steps}ba", optimizers=optimizer, **options).fit()
    return model, before


def of_one_batch(model, taken, accumulation_steps=2):
    """Train on whole batches; PyTorch alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(taken), accumulation_steps):
        window = taken[start : start + accumulation_steps]
        whole = {name: torch.cat([batch[name] for batch in window]) for name in window[0]}
        optimizer.zero_grad()
        model(**whole)["loss"].backward()
        model.passes += accumulation_steps - 1
        optimizer.step()
    return model


def require_same(model, expected):
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-14)


def cross_entropies(outputs, batch):
    return F.cross_entropy(outputs, batch["targets"], reduction="none")


def squares_of_parameters(net):
    return sum(parameter.square().sum() for parameter in net.parameters())


# -- parts that are small beside the loss


def with_variance(share):
    def loss(net, outputs, batch):
        return F.cross_entropy(outputs, batch["targets"]) + share * outputs.var(0).mean()

    return loss


@pytest.mark.parametrize(
    ("share", "dtype"), [(1e-3, torch.float32), (1e-10, torch.float64), (0.1, torch.float32)]
)
def test_a_small_part_that_depends_on_the_batch_is_warned_of(share, dtype, caplog):
    trained(with_variance(share), batches((4, 6), dtype), dtype)
    assert BY_BATCH in caplog.text


def test_a_number_of_the_batch_that_is_added_to_each_element_is_warned_of(caplog):
    def loss(net, outputs, batch):
        return (cross_entropies(outputs, batch) + 1e-10 * outputs.var(0).mean()).mean()

    trained(loss, batches((4, 6)))
    assert BY_BATCH in caplog.text


def test_pairs_of_samples_are_warned_of_before_any_pair_counts(caplog):
    def loss(net, outputs, batch):
        same = batch["targets"][:, None] == batch["targets"]
        distances = (outputs[:, None] - outputs).square().sum(-1)
        return F.cross_entropy(outputs, batch["targets"]) + (distances * same).sum(1).mean()

    taken = batches((4, 6))
    taken[0]["targets"] = torch.arange(4)
    trained(loss, taken)
    assert BY_BATCH in caplog.text


def test_a_small_part_that_is_a_mean_over_samples_is_not_warned_of(caplog):
    def loss(net, outputs, batch):
        return F.cross_entropy(outputs, batch["targets"]) + 1e-5 * outputs.square().mean()

    trained(loss, batches((4, 6), torch.float32), torch.float32)
    assert "divides" not in caplog.text


# -- weights in half precision


def with_relative_weights(net, outputs, batch):
    weights = batch["weights"] / batch["weights"].mean()
    return (cross_entropies(outputs, batch) * weights).mean()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_relative_weights_in_half_precision_are_refused(dtype, seed):
    with pytest.raises(DivisorError, match=WEIGHTS):
        trained(with_relative_weights, batches((40, 60, 40, 60), dtype, seed), dtype)


def with_squared_weights(net, outputs, batch):
    return (cross_entropies(outputs, batch) * batch["weights"].square()).mean()


def test_weights_of_single_samples_in_half_precision_train():
    taken = batches((40, 60, 40, 60), torch.bfloat16)
    model, before = trained(with_squared_weights, taken, torch.bfloat16)
    assert not torch.equal(model.linear.weight, before.linear.weight)


# -- penalties of parameters


def penalty_over_samples(net, outputs, batch):
    share = 0.5 if net.passes > 2 else 0.0
    penalty = share / len(outputs) * squares_of_parameters(net)
    return F.cross_entropy(outputs, batch["targets"]) + penalty


def test_a_penalty_over_the_samples_that_begins_later_is_refused_before_its_step():
    with pytest.raises(DivisorError, match=PENALTY):
        trained(penalty_over_samples, batches((4, 4, 4, 4)))


def growing_penalty(net, outputs, batch):
    share = 0.5 if net.passes > 2 else 0.0
    return F.cross_entropy(outputs, batch["targets"]) + share * squares_of_parameters(net)


def test_a_penalty_that_begins_later_is_that_of_one_batch():
    taken = batches((4, 6, 5, 3))
    model, before = trained(growing_penalty, taken)
    require_same(model, of_one_batch(before, taken))


def masked_with_penalty(net, outputs, batch):
    mask = batch["mask"].double()
    mean = (cross_entropies(outputs, batch) * mask).sum() / mask.sum().clamp(min=1)
    return mean + 0.1 * squares_of_parameters(net)


def masked(net, outputs, batch):
    mask = batch["mask"].double()
    return (cross_entropies(outputs, batch) * mask).sum() / mask.sum().clamp(min=1)


MASKED = ((masked, 1), (masked_with_penalty, 3))
"""Losses, and the samples of each batch."""
EMPTY = ((0,), (3,), (4, 5))
"""Batches whose masks are empty; 4 and 5 are one step of two ranks."""


def with_empty_masks(size, empty):
    taken = batches([size] * 8)
    for number, batch in enumerate(taken):
        batch["mask"][0] = True
        batch["mask"] &= number not in empty
    return taken


def weights_on_ranks():
    """Weights that each loss gives, on two ranks that read every other batch."""
    booster = Booster(plugin=Ddp())
    results = []
    for loss, size in MASKED:
        for empty in EMPTY:
            taken = with_empty_masks(size, empty)[booster.plugin.data_rank :: 2]
            options = {"accumulation_steps": 1, "booster": Booster(plugin=Ddp())}
            model, _ = trained(loss, taken, **options)
            results.append(model.state_dict())
    return results


def test_masks_that_are_empty_on_some_ranks_have_no_weight():
    expected = []
    for loss, size in MASKED:
        for empty in EMPTY:
            torch.manual_seed(0)
            model = of_one_batch(Net(loss).double(), with_empty_masks(size, empty))
            expected.append(model.state_dict())
    for results in run_ranks(weights_on_ranks, 2):
        for weights, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-14)


def largest_norms(net):
    return F.relu(net.linear.weight.norm(dim=1) - 0.2).sum()


def entropy(net):
    shares = net.linear.bias.softmax(0)
    return -(shares * shares.log()).sum()


def not_orthogonal(net):
    products = net.linear.weight.T @ net.linear.weight
    return (products - torch.eye(3)).norm()


def log_determinant(net):
    return -torch.linalg.slogdet(net.linear.weight.T @ net.linear.weight + torch.eye(3))[1]


def weighted_squares(net):
    """Elastic weight consolidation."""
    weights = torch.linspace(0.1, 1, 12, dtype=torch.float64).view(4, 3)
    return (weights * (net.linear.weight - 0.3).square()).sum()


PENALTIES = (largest_norms, entropy, not_orthogonal, log_determinant, weighted_squares)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_counts_once_beside_a_microbatch_without_items(penalty):
    def loss(net, outputs, batch):
        return masked(net, outputs, batch) + 0.1 * penalty(net)

    taken = with_empty_masks(4, empty=(3,))[:4]
    model, before = trained(loss, taken)
    require_same(model, of_one_batch(before, taken))


@pytest.mark.parametrize("penalty", [squares_of_parameters, weighted_squares])
def test_a_sum_with_a_penalty_that_each_microbatch_would_add_is_refused(penalty):
    def loss(net, outputs, batch):
        return cross_entropies(outputs, batch).sum() + 0.1 * penalty(net)

    with pytest.raises(DivisorError, match=r"sum over samples plus a penalty.*weight_decay"):
        trained(loss, batches((4, 6)))


def squares_of_differences(net, outputs, batch):
    """A learned baseline of shape [1], as the only sample of a part."""
    return (net.linear.bias[:1] - batch["weights"]).square().mean()


def mixture(net, outputs, batch):
    distances = (batch["x"][:, None] - net.linear.weight).square().sum(-1)
    return -torch.logsumexp(net.linear.bias.log_softmax(0) - distances, dim=-1).mean()


@pytest.mark.parametrize("part", [squares_of_differences, mixture])
def test_parameters_that_are_compared_with_samples_are_no_penalty(part):
    def loss(net, outputs, batch):
        return F.cross_entropy(outputs, batch["targets"]) + part(net, outputs, batch)

    taken = batches((3, 6, 5, 4))
    model, before = trained(loss, taken)
    require_same(model, of_one_batch(before, taken))


# -- samples that are selected because of others


def hardest(outputs, batch):
    losses = cross_entropies(outputs, batch)
    return losses, losses.detach().topk(len(losses) // 2)


def mean_of_hardest(outputs, batch):
    losses, _ = hardest(outputs, batch)
    return losses.topk(len(losses) // 2).values.mean()


def sorted_losses(outputs, batch):
    losses, _ = hardest(outputs, batch)
    return losses.sort(descending=True).values[: len(losses) // 2].mean()


def selected_by_number(outputs, batch):
    chosen = hardest(outputs, batch)[1].indices
    return F.cross_entropy(outputs[chosen], batch["targets"][chosen])


def selected_by_mask(outputs, batch):
    losses, largest = hardest(outputs, batch)
    mask = (losses >= largest.values[-1]).double()
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize(
    "hard", [mean_of_hardest, sorted_losses, selected_by_number, selected_by_mask]
)
def test_hard_examples_that_are_taken_later_are_refused_before_their_step(hard, seed):
    def loss(net, outputs, batch):
        if net.passes > 2:
            return hard(outputs, batch)
        return F.cross_entropy(outputs, batch["targets"])

    with pytest.raises(DivisorError, match=f"{WEIGHTS}|divides by"):
        trained(loss, batches((4, 4, 4, 4), seed=seed))


def test_the_hardest_words_of_each_sample_are_those_of_one_batch():
    def loss(net, outputs, batch):
        return outputs.square().topk(2, dim=1).values.mean()

    taken = batches((4, 6, 5, 3))
    model, before = trained(loss, taken)
    require_same(model, of_one_batch(before, taken))


# -- numbers that the batch holds


def weighted_by_a_number(net, outputs, batch):
    return 0.5 * batch["weight"] * F.cross_entropy(outputs, batch["targets"])


def test_a_weight_of_a_microbatch_that_the_batch_holds_is_that_of_plain_pytorch():
    taken = batches((4, 6, 5, 3))
    for batch, weight in zip(taken, (0.3, 0.9, 0.5, 0.2), strict=True):
        batch["weight"] = torch.tensor(weight, dtype=torch.float64)
    model, plain = trained(weighted_by_a_number, taken)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for window in (taken[:2], taken[2:]):
        samples = sum(len(batch["x"]) for batch in window)
        optimizer.zero_grad()
        for batch in window:
            (plain(**batch)["loss"] * len(batch["x"]) / samples).backward()
        optimizer.step()
    require_same(model, plain)


def test_weights_in_float32_are_summed_in_a_model_in_float64():
    def loss(net, outputs, batch):
        weights = batch["weights"].float()
        return (cross_entropies(outputs, batch) * weights).sum() / weights.sum()

    taken = batches((4, 6, 5, 3))
    for batch in taken:
        batch["weights"] = batch["weights"].float()
    model, before = trained(loss, taken)
    expected = of_one_batch(before, taken)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)


# -- words, and weights of classes


CLASS_WEIGHTS = torch.tensor([1.0, 0.3, 2.0, 0.7], dtype=torch.float64)


def of_labels(labels):
    return torch.tensor(CLASS_WEIGHTS.tolist(), dtype=torch.float64)[labels]


def multiplied(net, outputs, batch):
    kept = batch["targets"] >= 0
    weights = of_labels(batch["targets"][kept])
    losses = F.cross_entropy(outputs[kept], batch["targets"][kept], reduction="none")
    return (losses * weights).sum() / weights.sum()


def not_reduced(net, outputs, batch):
    options = {"weight": CLASS_WEIGHTS, "ignore_index": -1, "reduction": "none"}
    losses = F.cross_entropy(outputs, batch["targets"], **options)
    return losses.sum() / CLASS_WEIGHTS[batch["targets"][batch["targets"] >= 0]].sum()


def summed(net, outputs, batch):
    options = {"weight": CLASS_WEIGHTS, "ignore_index": -1, "reduction": "sum"}
    total = F.cross_entropy(outputs, batch["targets"], **options)
    return total / CLASS_WEIGHTS[batch["targets"][batch["targets"] >= 0]].sum()


@pytest.mark.parametrize("loss", [multiplied, not_reduced, summed])
def test_weights_of_classes_that_are_summed_by_hand_are_those_of_one_batch(loss):
    taken = batches((4, 6, 5, 3))
    for batch in (taken[1], taken[3]):
        batch["targets"][:2] = -1
    model, before = trained(loss, taken)
    require_same(model, of_one_batch(before, taken))


def balanced_classes(outputs, batch):
    counts = batch["targets"].bincount(minlength=4).clamp(min=1).double()
    return F.cross_entropy(outputs, batch["targets"], weight=1 / counts, reduction="none")


def balanced_positives(outputs, batch):
    positive = (batch["targets"] > 1).double()
    weight = (len(positive) - positive.sum()) / positive.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(
        outputs[:, 0], positive, pos_weight=weight, reduction="none"
    )


@pytest.mark.parametrize("balanced", [balanced_classes, balanced_positives])
def test_weights_of_losses_without_a_reduction_that_depend_on_the_batch_are_refused(balanced):
    """Each class is in the first batches alike."""

    def loss(net, outputs, batch):
        return balanced(outputs, batch).mean()

    taken = batches((8, 8, 4, 6))
    for batch in taken[:2]:
        batch["targets"] = torch.tensor([0, 2, 1, 3, 0, 2, 1, 3])
    with pytest.raises(DivisorError, match=WEIGHTS):
        trained(loss, taken)


def test_two_means_over_different_items_are_called_so():
    def loss(net, outputs, batch):
        weights = batch["weights"]
        weighted = (outputs.square().mean(1) * weights).sum() / weights.sum()
        return F.cross_entropy(outputs, batch["targets"]) + weighted

    words = "means over different items, over the .* and over the sum of values of 'weights'"
    with pytest.raises(DivisorError, match=words):
        trained(loss, batches((4, 6)))


def test_a_term_times_0_is_no_divisor():
    def loss(net, outputs, batch):
        weights = outputs.detach().square().sum(1)
        weighted = (cross_entropies(outputs, batch) * weights).sum() / weights.sum()
        return weighted + 0.0 * outputs.mean()

    with pytest.raises(DivisorError, match=r"divides by [\d.]+ for a batch of 4 samples"):
        trained(loss, batches((4, 6)))
