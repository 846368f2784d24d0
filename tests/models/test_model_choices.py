"""Every file of conf/model and conf/data makes what it says, from its own values alone."""

import importlib.util
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.nn import functional as F

from runner.data import Data, collate_pairs

CONF = Path(__file__).parents[2] / "conf"
OWNED = ("batch_size", "num_workers", "drop_last")
SHOWN_DATA = {
    "awd_lstm": "text",
    "cnn": "digits",
    "compressive": "text",
    "gated_conv": "text",
    "gpt": "text",
    "lstm": "text",
    "masked": "masked_text",
    "moe": "text",
    "rnn": "text",
}
LEAST_PIXELS = {"inception_v3": 75}
PARAMETERS = {
    "resnet18": 11_181_642,
    "resnet34": 21_289_802,
}


def chosen(group, name, **changes):
    section = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    return OmegaConf.create({"seed": 0, group: {**section, **changes}})[group]


def names(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def make_model(name):
    config = chosen("model", name)
    package = config["_target_"].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torch.manual_seed(0)
    return instantiate(config)


def make_data(name, **changes):
    config = chosen("data", name, **changes)
    return instantiate({key: value for key, value in config.items() if key not in OWNED})


@pytest.mark.parametrize("name", names("model"))
def test_a_model_takes_one_step_on_the_data_it_is_shown_with(name):
    model = make_model(name)
    if name in SHOWN_DATA:
        data = make_data(SHOWN_DATA[name])
        inputs, targets = collate_pairs(data.train.__getitems__([0, 1]))
    else:
        pixels = LEAST_PIXELS.get(name, 32)
        inputs, targets = torch.rand(2, 3, pixels, pixels), torch.tensor([3, 9])
    logits = model(inputs)
    logits = getattr(logits, "logits", logits)
    assert logits.shape == (*targets.shape, 256 if targets.ndim > 1 else 10)
    F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == PARAMETERS.get(name, parameters)


@pytest.mark.parametrize("name", [name for name, data in SHOWN_DATA.items() if data != "digits"])
def test_the_language_models_are_small(name):
    parameters = sum(parameter.numel() for parameter in make_model(name).parameters())
    assert 200_000 <= parameters <= 1_000_000


@pytest.mark.parametrize(
    ("name", "kind"),
    [("digits", "image"), ("text", "text"), ("synthetic", "image"), ("synthetic", "tokens")],
)
def test_data_made_from_its_file_is_complete(name, kind):
    data = make_data(name, **({"kind": "tokens"} if kind == "tokens" else {}))
    assert isinstance(data, Data)
    inputs, targets = data.train.__getitems__([0, len(data.train) - 1])
    assert len(data.test) > 0
    if kind == "image":
        assert inputs.shape == (2, 1, 8, 8)
        assert (data.items, targets.shape) == ("samples", (2,))
    else:
        assert data.items == "tokens"
        assert inputs.shape == targets.shape == (2, data.tokens_per_sample)


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_the_transformers_take_the_sequences_of_the_text(name):
    sequence_length = chosen("data", "text")["sequence_length"]
    assert chosen("model", name)["context"] >= sequence_length


@pytest.mark.parametrize("group", ["model", "data"])
def test_every_file_opens_with_its_purpose_and_the_command(group):
    for name in names(group):
        purpose, command = (CONF / group / f"{name}.yaml").read_text().splitlines()[:2]
        assert purpose.startswith("# ")
        assert command.startswith("# python -m runner")
        assert f"{group}={name}" in command


@pytest.mark.parametrize("name", names("data"))
def test_data_files_carry_the_keys_of_the_loader(name):
    shared = yaml.safe_load((CONF / "data_keys.yaml").read_text())
    config = {**shared, **chosen("data", name)}
    assert all(key in config for key in OWNED)
    assert config["batch_size"] >= 1
