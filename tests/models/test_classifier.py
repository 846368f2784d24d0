import pytest
import torch
from torch import nn

from runner.models import Classifier


def test_forward_takes_the_pair_and_loss_is_the_mean_cross_entropy():
    torch.manual_seed(0)
    network = nn.Linear(5, 3)
    model = Classifier(network, num_classes=3)
    batch = (torch.randn(4, 5), torch.tensor([0, 2, 1, 1]))
    outputs = model(batch)
    assert torch.equal(outputs, network(batch[0]))
    by_hand = -outputs.double().log_softmax(1)[torch.arange(4), batch[1]].mean()
    loss = model.loss(outputs, batch)
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), by_hand)
    loss.backward()
    assert network.weight.grad.abs().sum() > 0


def test_logits_of_another_width_are_refused():
    model = Classifier(nn.Linear(5, 7), num_classes=3)
    batch = (torch.randn(4, 5), torch.tensor([0, 2, 1, 1]))
    with pytest.raises(ValueError, match="7 logits a sample, num_classes is 3"):
        model.loss(model(batch), batch)
    assert Classifier(nn.Linear(5, 7)).loss(model(batch), batch) > 0
