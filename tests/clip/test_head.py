"""Which weights are those of a model's heads, that adaptive clipping leaves out by default."""

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models import get_model
from torchvision.models.segmentation import deeplabv3_resnet50, lraspp_mobilenet_v3_large

from runner.clip.units import head_weights
from runner.models import Classifier
from runner.models.gpt import GPT

TIMM = {
    "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "repvit_m1": ["head.head.l", "head.head_dist.l"],
    "crossvit_tiny_240": ["head.0", "head.1"],
}
NONE = {"weights": None, "weights_backbone": None}
SHAPE = {"vocabulary": 10, "context": 4, "layers": 1, "heads": 2, "width": 10, "dropout": 0.0}


class Transformers(nn.Module):
    """Names its output layer as transformers' language models do; encoders answer with None."""

    def __init__(self, encoder=False):
        super().__init__()
        self.lm_head = nn.Linear(4, 9)
        self.body = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
        self.encoder = encoder

    def get_output_embeddings(self):
        return None if self.encoder else self.lm_head


def distilled():
    return timm.create_model("deit_tiny_distilled_patch16_224")


MODELS = {
    **{name: (lambda name=name: timm.create_model(name), heads) for name, heads in TIMM.items()},
    "squeezenet": (lambda: get_model("squeezenet1_0"), ["classifier.1"]),
    "inception": (
        lambda: get_model("inception_v3", init_weights=False),
        ["AuxLogits.fc", "fc"],
    ),
    "deeplab": (
        lambda: deeplabv3_resnet50(aux_loss=True, **NONE),
        ["classifier.4", "aux_classifier.4"],
    ),
    "lraspp": (
        lambda: lraspp_mobilenet_v3_large(**NONE),
        ["classifier.low_classifier", "classifier.high_classifier"],
    ),
    "without classes": (lambda: timm.create_model("resnet18", num_classes=0), []),
    "wrapped": (lambda: Classifier(distilled()), ["module.head", "module.head_dist"]),
    "wrapped inside": (
        lambda: nn.Sequential(nn.Identity(), Classifier(distilled())),
        ["1.module.head", "1.module.head_dist"],
    ),
    # As wide as its vocabulary, so that every projection has as many outputs as the head.
    "tied": (lambda: GPT(**SHAPE, tied=True, bias=True), ["embed"]),
    "not tied": (lambda: GPT(**SHAPE, tied=False, bias=True), ["head"]),
    "named": (Transformers, ["lm_head"]),
    "encoder": (lambda: Transformers(encoder=True), ["body.1"]),
    "last": (lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Conv1d(3, 3, 1)), ["0"]),
    "no layer": (lambda: nn.LayerNorm(3), []),
}


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_models(name):
    make, heads = MODELS[name]
    with torch.device("meta"):
        assert head_weights(make()) == tuple(f"{head}.weight" for head in heads)


def test_the_matrices_that_the_weight_of_a_head_is_computed_from_are_left_out():
    assert head_weights(nn.Linear(2, 3)) == ("weight",)
    model = nn.Sequential(nn.Linear(3, 4), parametrizations.weight_norm(nn.Linear(4, 2)))
    where = "1.parametrizations.weight.original"
    assert head_weights(model) == (f"{where}0", f"{where}1")
