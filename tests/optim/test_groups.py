"""Parameter groups by patterns of names, against groups that are written by hand."""

import pytest
import torch
from torch import nn

from runner.optim.groups import GroupError, parameter_groups, require_settings
from tests.clip.reference import refused


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)


def names_by_settings(groups, model):
    """The names of the parameters of each group, by the settings of the group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        listed[tuple(sorted(settings.items()))] = [names[id(p)] for p in group["params"]]
    return listed


def test_the_first_pattern_that_matches_a_name_counts():
    model = Net()
    groups = parameter_groups(model, {"head.*": {"lr": 0.5}, "*.bias": {"weight_decay": 0.0}})
    assert names_by_settings(groups, model) == {
        (): ["embed.weight", "body.0.weight", "body.1.weight"],
        (("weight_decay", 0.0),): ["body.0.bias", "body.1.bias"],
        (("lr", 0.5),): ["head.weight", "head.bias"],
    }


def test_no_decay_takes_vectors_and_embeddings():
    model = Net()
    groups = parameter_groups(model, {}, no_decay=True)
    assert names_by_settings(groups, model) == {
        (): ["body.0.weight", "head.weight"],
        (("weight_decay", 0.0),): [
            "embed.weight",
            "body.0.bias",
            "body.1.weight",
            "body.1.bias",
            "head.bias",
        ],
    }


def test_a_pattern_that_sets_a_decay_keeps_it_beside_no_decay():
    model = Net()
    groups = parameter_groups(model, {"head.*": {"weight_decay": 0.1}}, no_decay=True)
    by_settings = names_by_settings(groups, model)
    assert by_settings[("weight_decay", 0.1),] == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"heed.*": {}}, "'heed.*' matches no parameter  (parameters: embed.weight, "),
        ({"head.*": {}, "head.bias": {}}, "'head.bias' matches only parameters of earlier"),
    ],
)
def test_a_pattern_that_takes_no_parameter_is_refused(patterns, words):
    refused(GroupError, words, parameter_groups, Net(), patterns)


def test_a_group_may_be_left_out_of_clipping():
    patterns = {"head.*": {"clip": False}}
    optimizer = torch.optim.SGD(parameter_groups(Net(), patterns), lr=0.1)
    require_settings(optimizer, patterns)
    assert [group.get("clip") for group in optimizer.param_groups] == [None, False]


def test_a_threshold_of_a_pattern_is_refused():
    patterns = {"head.*": {"clip": 0.5}}
    optimizer = torch.optim.SGD(parameter_groups(Net(), patterns), lr=0.1)
    words = "clip of 'head.*' must be false, not 0.5|clip=groups"
    refused(GroupError, words, require_settings, optimizer, patterns)


def test_a_setting_that_the_optimizer_does_not_have_is_refused():
    patterns = {"head.*": {"weigth_decay": 0.0}}
    optimizer = torch.optim.SGD(parameter_groups(Net(), patterns), lr=0.1)
    words = "'weigth_decay' of 'head.*' is no setting of SGD; did you mean weight_decay?"
    refused(GroupError, words, require_settings, optimizer, patterns)
