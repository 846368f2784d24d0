"""Which dimensions of a parameter index outputs, by the layer that owns it."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from runner import GradientClipping, apply_gradient_clipping
from runner.clip import GradStats, Layout, Units, build
from runner.clip.layout import OptionError
from runner.clip.units import units_of
from runner.config.clip_section import clip_section


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


def units(module, name):
    return (
        Layout.of_model(nn.ModuleDict({"it": module}))
        .with_units({})[[own for own, _ in module.named_parameters()].index(name)]
        .units
    )


SHARDED = type("FSDPConv1D", (Conv1D,), {})
E, H, I = 4, 6, 3  # noqa: E741
MIXTRAL = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
BMM = {"gate_up_proj": (E, H, 2 * I), "down_proj": (E, I, H)}
SQUARE = {"gate_up_proj": (E, 6, 6), "down_proj": (E, 6, 3)}
SQUARE_BMM = {"gate_up_proj": (E, 6, 6), "down_proj": (E, 3, 6)}
KINDS = [
    (nn.Linear(3, 4), "weight", (1,)),
    (nn.Linear(3, 4), "bias", (0,)),
    (Conv1D(4, 3), "weight", (0,)),
    (Conv1D(4, 4), "weight", (0,)),
    (SHARDED(4, 3), "weight", (0,)),
    (Owner({"in_features": 3, "out_features": 4}, weight=(3, 4)), "weight", (0,)),
    (Owner({"in_features": 3, "out_features": 4}, weight=(4, 3)), "weight", (1,)),
    (Owner({"in_features": 3, "out_features": 3}, weight=(3, 3)), "weight", (1,)),
    (Owner({"input_size": 3, "output_size": 4}, weight=(E + 1, 4, 3)), "weight", (2,)),
    (Owner({"input_size": 3, "output_size": 4}, weight=(E + 1, 3, 4)), "weight", (1,)),
    *[(Owner(**MIXTRAL), name, (2,)) for name in MIXTRAL],
    *[(Owner(**BMM), name, (1,)) for name in BMM],
    *[(Owner(**SQUARE), name, (2,)) for name in SQUARE],
    *[(Owner(**SQUARE_BMM), name, (1,)) for name in SQUARE_BMM],
    (Owner({"is_transposed": False}, up_proj=(E, I, H)), "up_proj", (2,)),
    (Owner({"is_transposed": True}, up_proj=(E, H, I)), "up_proj", (1,)),
    (Owner(**BMM, gate_up_proj_bias=(E, 2 * I)), "gate_up_proj_bias", (1,)),
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
    (
        parametrizations.weight_norm(nn.Conv2d(2, 3, 3)),
        "parametrizations.weight.original1",
        (1, 2, 3),
    ),
    (
        parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 3)),
        "parametrizations.weight.original1",
        (0, 2, 3),
    ),
]


@pytest.mark.parametrize(
    ("module", "name", "dims"), KINDS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_the_owner_tells_which_dimensions_a_unit_spans(module, name, dims):
    assert units(module, name) == Units(dims)


def test_a_weight_norm_of_the_older_kind_keeps_the_outputs_of_its_layer():
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
    ("dims", "fraction"), [(1, 4), ([0, 2], 2 * 3), ((), 1), ([-1], 3), ((0, 1, 2), 24)]
)
def test_the_user_names_the_dimensions(dims, fraction):
    layout = Layout.of_model(gradients(Owner(w=(2, 4, 3))))
    mode = build("adaptive", threshold=0.5, units={"*": dims})
    with torch.no_grad():
        layout.shards[0].param.flatten()[0] = 100.0  # One unit alone is not clipped.
    clipped = mode.clip(layout, GradStats(1.0, True)).fraction
    assert clipped == pytest.approx((fraction - 1) / fraction)


def test_the_last_pattern_that_matches_counts():
    layout = Layout.of_model(Owner(a=(2, 3, 4), b=(2, 3, 4)))
    found = layout.with_units({"*": 0, "b": [0, 1]})
    assert [shard.units.dims for shard in found] == [(1, 2), (2,)]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"x.*": 0}, r"clip\.units=x\.\* matches no parameter of: a, b"),
        ({"*": 2}, r"\* names dimension 2 of b, whose shape is \[5, 6\]"),
        ({"b": [0, -3]}, r"b names dimension -3 of b, whose shape is \[5, 6\]"),
    ],
)
def test_units_that_do_not_fit_the_model_are_errors(units, message):
    model = Owner(a=(2, 3, 4), b=(5, 6))
    with pytest.raises(OptionError, match=message) as error:
        build("adaptive", threshold=0.1, units=units).bind(Layout.of_model(model))
    assert error.value.option == "units"


@pytest.mark.parametrize("wrong", ["0", 1.0, True, None, ["a"], {"a": 1}])
def test_units_that_are_no_dimensions_are_errors(wrong):
    with pytest.raises(ValueError, match="units of w must be the dimension"):
        GradientClipping("adaptive", 0.1, units={"w": wrong}).mode()


def test_units_are_an_argument_of_the_library():
    by_rows = apply_gradient_clipping(gradients(Owner(w=(5, 6))), "adaptive", 0.5)
    by_columns = apply_gradient_clipping(
        gradients(Owner(w=(5, 6))), "adaptive", 0.5, units={"w": 1}
    )
    assert (by_rows.fraction, by_columns.fraction) == (1.0, 1.0)
    assert by_columns.norm_clipped == pytest.approx(by_rows.norm_clipped)
    mode = GradientClipping("adaptive", 0.5, units={"w": [1]}).mode()
    assert mode.units == {"w": [1]}


def warnings_of(caplog, model, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "runner.clip"):
        apply_gradient_clipping(gradients(model), "adaptive", 0.1, **options)
    return [record.getMessage() for record in caplog.records]


def test_an_unknown_owner_is_warned_about_once(caplog):
    [said] = warnings_of(caplog, Owner(once=(2, 3, 4), bias=(3,)))
    assert "dimension 0 for the outputs of once [2, 3, 4], because" in said
    assert "set clip.units={once:D}" in said
    assert warnings_of(caplog, Owner(once=(2, 3, 4))) == []
    assert warnings_of(caplog, Owner(other=(2, 3, 4)), units={"o*": 0}) == []
    assert warnings_of(caplog, nn.Conv2d(1, 2, 3)) == []
    [said] = warnings_of(caplog, Owner(**{f"w{i}": (2, 3, 4) for i in range(7)}))
    assert "w4 [2, 3, 4] and 2 more, because" in said


def test_a_model_that_is_only_checked_is_not_warned_about(caplog):
    with torch.device("meta"):
        layout = Layout.of_model(Owner(checked=(2, 3, 4)))
    build("adaptive", threshold=0.1).bind(layout)
    assert not caplog.records


def test_the_config_hands_units_over():
    clip = {"mode": "adaptive", "threshold": 0.1, "norm_type": 2.0, "nonfinite": "skip"}
    clip |= {"max_skips": 50, "what_if": [], "exclude": [], "eps": 1e-3}
    for given in (None, {"w": [0, 1]}):
        section = clip_section(clip).model_validate(clip | {"units": given})
        assert build(section.kind, **section.options).units == given
