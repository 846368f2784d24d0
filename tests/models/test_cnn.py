import pytest
import torch
from torch.nn import functional as F

from runner.data import PartitionedBatches
from runner.data.digits import digits
from runner.models import DigitsCNN


def test_images_become_one_logit_a_class():
    assert DigitsCNN(num_classes=7, width=4)(torch.rand(3, 1, 8, 8)).shape == (3, 7)


def test_parameters_are_those_of_three_convolutions_and_a_head():
    model = DigitsCNN(num_classes=10, width=32)
    expected = (9 * 32 + 32) + (9 * 32 * 64 + 64) + (9 * 64 * 64 + 64) + (256 * 10 + 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_a_samples_logits_do_not_depend_on_the_rest_of_its_batch():
    model = DigitsCNN(num_classes=10, width=4)
    images = torch.rand(6, 1, 8, 8)
    assert model.training
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_the_digits_within_a_few_epochs_of_clipped_steps(seed):
    torch.manual_seed(seed)
    data = digits(test_fraction=0.2, seed=0)
    model = DigitsCNN(num_classes=10, width=16)
    order = PartitionedBatches(len(data.train), 32, 0, 1, shuffle=True, drop_last=False, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        order.set_epoch(epoch)
        for indices in order:
            images, targets = data.train.__getitems__(indices)
            optimizer.zero_grad()
            F.cross_entropy(model(images), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    with torch.no_grad():
        hits = model(data.test.inputs).argmax(dim=1) == data.test.targets
    assert hits.float().mean() > 0.93
