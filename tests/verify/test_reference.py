"""One process is a plain training of PyTorch, without dropout and in its own precision."""

from itertools import islice

import pytest
import timm
import torch
import torchvision
from torch import nn

from runner.booster.plugin import SinglePlugin
from runner.config.check import parse
from runner.train import build
from runner.train.maker import maker
from runner.verify.reference import Reference, make_mode, make_samples, switch_off_dropout
from tests.verify.requests import IMAGES, net, plain_of


def config_of(*words):
    return parse(plain_of(*IMAGES, *words))


def reference_of(config, parts, mode="norm", **options):
    samples = make_samples(config, parts)
    return Reference(config, make_mode(config, mode)[0], parts, samples, **options)


def test_it_is_a_plain_training_of_one_process():
    config = config_of("clip=norm", "clip.threshold=0.5", "verify.lr=0.3")
    reference = reference_of(config, 2)
    torch.manual_seed(config.seed)
    model = maker(config.model)().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    order = SinglePlugin().prepare_dataloader(
        build.make_data(config.data).train, 16, shuffle=True, seed=config.seed
    )
    for inputs, targets in islice(order, 3):
        loss = torch.nn.functional.cross_entropy(model(inputs.double()), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        metrics, mean, theirs = reference.step()
        # torch adds 1e-6 to the norm it divides by.
        assert mean == pytest.approx(loss.item(), rel=1e-6)
        assert metrics["norm"] == pytest.approx(norm.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(theirs[name], parameter.grad, rtol=1e-5, atol=1e-9)
        optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_of_zero_gives_no_threshold():
    config = config_of("clip=none", *net("Constant"))
    with pytest.raises(ValueError, match=r"give clip\.threshold"):
        reference_of(config, 1, "value").peak()


def test_every_kind_of_dropout_is_switched_off():
    def draws(model, inputs):
        before = torch.get_rng_state()
        model(inputs)
        return not torch.equal(torch.get_rng_state(), before)

    image = torch.randn(2, 3, 32, 32)
    for model, inputs in (
        (torchvision.models.efficientnet_b0(num_classes=4), image),  # stochastic depth
        (timm.create_model("resnet10t", drop_rate=0.2, drop_path_rate=0.2), image),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.3), torch.randn(3, 2, 4)),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.2), torch.randn(3, 2, 8)),
        (nn.Sequential(nn.AlphaDropout(0.2), nn.Dropout2d(1.0)), image),
    ):
        assert draws(model, inputs), type(model)
        switch_off_dropout(model)
        assert not draws(model, inputs), type(model)


def test_an_attribute_whose_name_only_begins_like_dropout_stays():
    for model in (nn.LSTM(4, 4, num_layers=2, dropout=0.3), nn.Sequential(nn.Dropout(0.2))):
        model.drop_last = True
        model.dropped_tokens = 7
        switch_off_dropout(model)
        assert (model.drop_last, model.dropped_tokens) == (True, 7)


def test_a_wrong_norm_of_the_code_that_both_sides_share_is_found(monkeypatch):
    config = config_of("clip=norm", "clip.threshold=0.5")
    right = reference_of(config, 1).step()[0]["norm"]
    monkeypatch.setattr("runner.verify.reference.side_of", lambda _: {"norm": right / 2})
    assert reference_of(config, 1).step()[0]["norm"] == pytest.approx(right, rel=1e-12)
