"""Which dimensions of a parameter index outputs, by the layer that owns it; and what heads are."""

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from runner import apply_gradient_clipping
from runner.clip import Norms, build
from runner.clip.patterns import with_units
from runner.gradients import Layout, Units
from runner.gradients.layout import OptionError
from runner.gradients.units import head_weights, units_of
from runner.models import Classifier
from runner.models.gpt import GPT
from tests.clip.reference import refused


class Conv1D(nn.Module):
    """By the name of transformers' linear layer with its weight [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.ones(nx, nf))


class Owner(nn.Module):
    """Parameters of the given shapes, and whatever the layer says about itself."""

    def __init__(self, said=None, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        for key, value in (said or {}).items():
            setattr(self, key, value)


SHARDED = type("FSDPConv1D", (Conv1D,), {})
FEATURES = {"in_features": 3, "out_features": 4}
SIZES = {"input_size": 3, "output_size": 4}
EXPERTS = [
    ({"gate_up_proj": (4, 6, 6), "down_proj": (4, 6, 3)}, (2,)),
    ({"gate_up_proj": (4, 6, 6), "down_proj": (4, 3, 6)}, (1,)),
]
KINDS = [
    (nn.Linear(3, 4), "weight", (1,)),
    (nn.Linear(3, 4), "bias", (0,)),
    (Conv1D(4, 3), "weight", (0,)),
    (Conv1D(4, 4), "weight", (0,)),
    (SHARDED(4, 3), "weight", (0,)),
    (Owner(FEATURES, weight=(3, 4)), "weight", (0,)),
    (Owner(FEATURES, weight=(4, 3)), "weight", (1,)),
    (Owner({"in_features": 3, "out_features": 3}, weight=(3, 3)), "weight", (1,)),
    (Owner(SIZES, weight=(5, 4, 3)), "weight", (2,)),
    (Owner(SIZES, weight=(5, 3, 4)), "weight", (1,)),
    *((Owner(**shapes), name, dims) for shapes, dims in EXPERTS for name in shapes),
    (nn.Embedding(5, 3), "weight", (1,)),
    (nn.Bilinear(3, 4, 5), "weight", (1, 2)),
    (nn.MultiheadAttention(6, 2, add_bias_kv=True), "in_proj_weight", (1,)),
    (nn.MultiheadAttention(6, 2, add_bias_kv=True), "bias_k", (1, 2)),
    (nn.LSTM(3, 4, proj_size=2), "weight_ih_l0", (1,)),
    (nn.LSTM(3, 4, proj_size=2), "weight_hr_l0", (1,)),
    (nn.Conv2d(6, 6, 3, groups=6), "weight", (1, 2, 3)),
    (nn.ConvTranspose2d(4, 6, 3), "weight", (0, 2, 3)),
    (nn.LayerNorm((2, 3, 4)), "weight", (0, 1, 2)),
    (Owner(scale=(5, 1, 1)), "scale", (0, 1, 2)),
    (Owner(token=(1, 1, 5)), "token", (0, 1, 2)),
    *(
        (parametrizations.weight_norm(kind(2, 3, 3)), "parametrizations.weight.original1", dims)
        for kind, dims in ((nn.Conv2d, (1, 2, 3)), (nn.ConvTranspose2d, (0, 2, 3)))
    ),
]


def units(module, name):
    shards = {shard.name: shard.units for shard in Layout.of_model(module).shards}
    return shards[name]


def test_the_owner_tells_which_dimensions_a_unit_spans():
    for module, name, dims in KINDS:
        assert units(module, name) == Units(dims), (module, name)
    with pytest.warns(FutureWarning):
        layer = weight_norm(nn.ConvTranspose1d(2, 3, 3))
    assert units(layer, "weight_v") == Units((0, 2))


def test_nothing_is_known_about_three_dimensions_of_unknown_owners():
    assert units_of(torch.ones(2, 3, 4)) == Units((1, 2), known=False)
    owner = Owner({"in_features": 3, "out_features": 3}, w=(3, 3, 3))
    assert not units(owner, "w").known


def gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.parametrize(
    ("dims", "units"), [(1, 4), ([0, 2], 2 * 3), ((), 1), ([-1], 3), ((0, 1, 2), 24)]
)
def test_the_user_names_the_dimensions(dims, units):
    layout = Layout.of_model(gradients(Owner(w=(2, 4, 3))))
    mode = build("adaptive", threshold=0.5, units={"*": dims})
    with torch.no_grad():
        layout.shards[0].param.view(-1)[0] = 100.0  # One unit alone is not clipped.
    clipped = mode.clip(layout, Norms.measured(torch.tensor(1.0, dtype=torch.float64))).fraction
    assert clipped == pytest.approx((units - 1) / units)


def test_the_last_pattern_that_matches_names_the_dimensions():
    layout = Layout.of_model(Owner(a=(2, 3, 4), b=(2, 3, 4)))
    shards = with_units(layout, {"*": 0, "b": [0, 1]})
    assert [shard.units.dims for shard in shards] == [(1, 2), (2,)]


def test_units_that_do_not_fit_the_model_are_errors():
    model = Owner(a=(2, 3, 4), b=(5, 6))
    for given, words in (
        ({"x.*": 0}, "clip.units=x.* matches no parameter|a, b"),
        ({"*": 2}, "dimension 2 of b|[5, 6]"),
        ({"b": [0, -3]}, "dimension -3 of b|[5, 6]"),
    ):
        mode = build("adaptive", threshold=0.1, units=given)
        refused(OptionError, words, mode.bind, Layout.of_model(model))
    mode = build("adaptive", threshold=0.1, exclude=("heaad.*",))
    refused(OptionError, "heaad.*|a, b", mode.bind, Layout.of_model(model))


def test_an_unknown_owner_is_warned_about_once(caplog):
    for model, options, words in (
        (Owner(once=(2, 3, 4), bias=(3,)), {}, ["once [2, 3, 4]", "clip.units={once:D}"]),
        (Owner(once=(2, 3, 4)), {}, []),
        (Owner(other=(2, 3, 4)), {"units": {"o*": 0}}, []),
        (Owner(out=(2, 3, 4), w=(2, 2)), {"exclude": ["out"]}, []),
    ):
        caplog.clear()
        apply_gradient_clipping(gradients(model), "adaptive", 0.1, **options)
        assert len(caplog.records) == bool(words)
        assert all(word in caplog.records[0].getMessage() for word in words)


# -- heads


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
    "distilled": (distilled, ["head", "head_dist"]),
    "two branches": (lambda: timm.create_model("crossvit_tiny_240"), ["head.0", "head.1"]),
    "without classes": (lambda: timm.create_model("resnet18", num_classes=0), []),
    "wrapped": (
        lambda: nn.Sequential(nn.Identity(), Classifier(distilled())),
        ["1.module.head", "1.module.head_dist"],
    ),
    # As wide as its vocabulary, so that every projection has as many outputs as the head.
    "tied": (lambda: GPT(**SHAPE, tied=True, bias=True), ["embed"]),
    "not tied": (lambda: GPT(**SHAPE, tied=False, bias=True), ["head"]),
    "named": (Transformers, ["lm_head"]),
    "encoder": (lambda: Transformers(encoder=True), ["body.1"]),
    "last": (lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Conv1d(3, 3, 1)), ["0"]),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1)), ["1"]),
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
