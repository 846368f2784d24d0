import timm
import torch
import torchvision
from torch import nn

from runner.clip.mode import NEVER
from runner.config.check import parse
from runner.models.gpt import GPT
from runner.verify.setting import collate, make_mode, notes, switch_off_dropout
from tests.verify.requests import IMAGES, plain_of


def draws(model, inputs):
    model.train()
    before = torch.get_rng_state()
    model(inputs)
    return not torch.equal(torch.get_rng_state(), before)


def test_every_kind_of_dropout_is_switched_off():
    image = torch.randn(2, 3, 32, 32)
    cases = [
        (GPT(16, 8, 2, 2, 8, tied=True, bias=True, dropout=0.1), torch.zeros(2, 8).long()),
        (torchvision.models.efficientnet_b0(num_classes=4), image),  # stochastic depth
        (timm.create_model("resnet10t", drop_rate=0.2, drop_path_rate=0.2), image),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.3), torch.randn(3, 2, 4)),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.2), torch.randn(3, 2, 8)),
        (nn.Sequential(nn.AlphaDropout(0.2), nn.Dropout2d(1.0)), image),
    ]
    for model, inputs in cases:
        assert draws(model, inputs), type(model)
        assert switch_off_dropout(model) > 0
        assert not draws(model, inputs), type(model)
        assert switch_off_dropout(model) == 0


def test_only_chances_are_switched_off():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    model.drop_last = True
    model.dropped_tokens = 7
    assert switch_off_dropout(model) == 0
    assert (model.drop_last, model.dropped_tokens) == (True, 7)


def test_the_requests_threshold_is_that_of_its_own_mode():
    config = parse(plain_of(*IMAGES, "clip=norm", "clip.threshold=0.3"))
    own, derived = make_mode(config, "norm")
    assert (own.threshold, derived) == (0.3, False)
    other, derived = make_mode(config, "value")
    assert (other.threshold, derived) == (NEVER, True)
    none, derived = make_mode(config, "none")
    assert (none.threshold, derived) == (None, False)
    unclipped = parse(plain_of(*IMAGES, "clip=none"))
    assert make_mode(unclipped, "norm")[1]


def test_a_request_that_is_kept_to_needs_no_note():
    same = "optimizer._target_=torch.optim.SGD optimizer.lr=0.1 ~optimizer.momentum "
    same += "~optimizer.weight_decay ~optimizer.nesterov scheduler=constant"
    assert list(notes(parse(plain_of(*IMAGES, *same.split())))) == []
    said = list(notes(parse(plain_of(*IMAGES, "optimizer=adamw"))))
    assert len(said) == 1
    assert "instead of AdamW and its schedule" in said[0]


def test_floating_point_parts_of_a_batch_are_cast_and_integers_are_not():
    inputs, targets = collate([(torch.ones(2), 3), (torch.ones(2), 4)], torch.float64)
    assert inputs.dtype == torch.float64
    assert targets.dtype == torch.int64
