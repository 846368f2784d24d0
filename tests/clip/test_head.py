"""Which weights are those of a model's heads, that adaptive clipping leaves out by default."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from runner import apply_gradient_clipping
from runner.clip.head import head_weights
from runner.models import Classifier
from runner.models.gpt import GPT

TIMM = {
    "deit_tiny_distilled_patch16_224": ("head.weight", "head_dist.weight"),
    "levit_128": ("head.linear.weight", "head_dist.linear.weight"),
    "repvit_m1": ("head.head.l.weight", "head.head_dist.l.weight"),
    "crossvit_tiny_240": ("head.0.weight", "head.1.weight"),
    "caformer_s18": ("head.fc.fc2.weight",),
    "dla34": ("fc.weight",),
    "vit_tiny_patch16_224": ("head.weight",),
}
TORCHVISION = {
    "squeezenet1_0": ("classifier.1.weight",),
    "resnet18": ("fc.weight",),
    "googlenet": ("aux1.fc2.weight", "aux2.fc2.weight", "fc.weight"),
    "inception_v3": ("AuxLogits.fc.weight", "fc.weight"),
    "vit_b_16": ("heads.head.weight",),
    "mobilenet_v3_small": ("classifier.3.weight",),
}


def torchvision_model(name):
    from torchvision.models import get_model

    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return get_model(name, **options)


@pytest.mark.parametrize("name", TIMM)
def test_heads_of_timm(name):
    import timm

    with torch.device("meta"):
        assert head_weights(timm.create_model(name)) == TIMM[name]


@pytest.mark.parametrize("name", TORCHVISION)
def test_heads_of_torchvision(name):
    with torch.device("meta"):
        assert head_weights(torchvision_model(name)) == TORCHVISION[name]


def test_heads_of_segmentation():
    from torchvision.models.segmentation import deeplabv3_resnet50, lraspp_mobilenet_v3_large

    none = {"weights": None, "weights_backbone": None}
    with torch.device("meta"):
        both = deeplabv3_resnet50(aux_loss=True, **none)
        assert head_weights(both) == ("classifier.4.weight", "aux_classifier.4.weight")
        assert head_weights(lraspp_mobilenet_v3_large(**none)) == (
            "classifier.low_classifier.weight",
            "classifier.high_classifier.weight",
        )


def test_a_model_without_classes_has_no_head():
    import timm

    with torch.device("meta"):
        assert head_weights(timm.create_model("resnet18", num_classes=0)) == ()


@pytest.mark.parametrize(
    "wrap", [Classifier, lambda m: nn.Sequential(nn.Identity(), Classifier(m))]
)
def test_wrappers_are_looked_into(wrap):
    import timm

    with torch.device("meta"):
        found = head_weights(wrap(timm.create_model("deit_tiny_distilled_patch16_224")))
    assert [name.split("module.")[-1] for name in found] == ["head.weight", "head_dist.weight"]


SHAPE = {"vocabulary": 10, "context": 4, "layers": 1, "heads": 2, "width": 10, "dropout": 0.0}


@pytest.mark.parametrize(("tied", "name"), [(True, "embed.weight"), (False, "head.weight")])
def test_a_language_model_has_one_head_whatever_its_sizes(tied, name):
    # As wide as its vocabulary, so that every projection has as many outputs as the head.
    assert head_weights(GPT(**SHAPE, tied=tied, bias=True)) == (name,)


class Transformers(nn.Module):
    """Names its output layer as transformers' language models do."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(4, 9)
        self.body = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))

    def get_output_embeddings(self):
        return self.lm_head


def test_a_model_may_name_its_output_layer():
    assert head_weights(Transformers()) == ("lm_head.weight",)


class Encoder(Transformers):
    """As transformers' encoders answer, which have none."""

    def get_output_embeddings(self):
        return None


def test_the_last_linear_layer_is_the_head_of_a_model_that_names_none():
    assert head_weights(Encoder()) == ("body.1.weight",)
    assert head_weights(nn.Linear(2, 3)) == ("weight",)
    assert head_weights(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Conv1d(3, 3, 1))) == (
        "0.weight",
    )
    assert head_weights(nn.LayerNorm(3)) == ()


def test_the_matrices_that_the_weight_of_a_head_is_computed_from_are_left_out():
    model = nn.Sequential(nn.Linear(3, 4), parametrizations.weight_norm(nn.Linear(4, 2)))
    assert head_weights(model) == (
        "1.parametrizations.weight.original0",
        "1.parametrizations.weight.original1",
    )


def test_what_is_left_out_is_logged(caplog):
    model = nn.ModuleDict(
        {"body": nn.Linear(3, 4), "head": nn.Linear(4, 2), "head_b": nn.Linear(4, 2)}
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with caplog.at_level(logging.INFO, "runner.clip"):
        apply_gradient_clipping(model, "adaptive", 1e-3)
        apply_gradient_clipping(model, "adaptive", 1e-3)
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "clip.exclude=auto: adaptive clipping leaves out head.weight, head_b.weight"
    assert torch.all(model["head"].weight.grad == 7)
    assert torch.all(model["head_b"].weight.grad == 7)
    assert torch.all(model["body"].weight.grad < 7)
    assert torch.all(model["head"].bias.grad < 7)
