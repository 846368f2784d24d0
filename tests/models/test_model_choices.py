"""Every file of conf/model and conf/data makes what it describes; the models of images."""

from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

from runner.data import collate_pairs
from runner.models import Classifier

CONF = Path(__file__).parents[2] / "conf"
TEXT = ("awd_lstm", "gated_conv", "gpt", "lstm", "moe", "rnn")
SHOWN_DATA = dict.fromkeys(TEXT, "text") | {"cnn": "digits", "masked": "masked_text"}
LEAST_PIXELS = {"inception_v3": 75}
PARAMETERS = {"resnet18": 11_181_642, "resnet34": 21_289_802}


def chosen(group, name):
    section = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    resolved = OmegaConf.create({"seed": 0, group: section})[group]
    return instantiate({key: value for key, value in resolved.items() if key != "batch_size"})


@pytest.mark.parametrize("name", sorted(file.stem for file in CONF.glob("model/*")))
def test_a_model_takes_one_step_on_the_data_it_is_shown_with(name):
    if name == "nf_resnet":
        pytest.importorskip("timm")
    torch.manual_seed(0)
    model = chosen("model", name)
    if name in SHOWN_DATA:
        data = chosen("data", SHOWN_DATA[name])
        inputs, targets = collate_pairs(data.train.__getitems__([0, 1]))
    else:
        pixels = LEAST_PIXELS.get(name, 32)
        inputs = torch.rand(2, 3, pixels, pixels)
        targets = torch.tensor([3, 9])
    logits = model(inputs)
    logits = getattr(logits, "logits", logits)
    assert logits.shape == (*targets.shape, 256 if targets.ndim > 1 else 10)
    F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == PARAMETERS.get(name, parameters)
    assert targets.ndim == 1 or 200_000 <= parameters <= 1_000_000


def test_a_classifier_has_a_mean_cross_entropy_of_its_own():
    torch.manual_seed(0)
    network = nn.Linear(5, 3)
    model = Classifier(network, num_classes=3)
    batch = (torch.randn(4, 5), torch.tensor([0, 2, 1, 1]))
    outputs = model(batch)
    assert torch.equal(outputs, network(batch[0]))
    by_hand = -outputs.double().log_softmax(1)[torch.arange(4), batch[1]].mean()
    torch.testing.assert_close(model.loss(outputs, batch).double(), by_hand)
    wider = Classifier(nn.Linear(5, 7), num_classes=3)
    with pytest.raises(ValueError, match="7 logits a sample, num_classes is 3"):
        wider.loss(wider(batch), batch)
    assert Classifier(nn.Linear(5, 7)).loss(wider(batch), batch) > 0
