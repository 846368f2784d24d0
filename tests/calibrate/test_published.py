"""Recipes beside what was measured: thresholds of the same mode alone."""

import pytest

from runner.calibrate.published import nearest, published


@pytest.mark.parametrize(
    ("recipe", "kind", "mode", "threshold"),
    [
        ("awd_lstm", "language", "norm", 0.25),
        ("tabert", "language", "norm", 1.0),
        ("inception", "vision", "norm", 2.0),
        ("cifar10_resnet34", "vision", "norm", 0.1),
        ("nf_resnet_brock", "vision", "adaptive", 0.01),
        ("rnn_value", "language", "value", 15.0),
    ],
)
def test_a_recipe_is_read(recipe, kind, mode, threshold):
    [one] = [one for one in published() if one.recipe == recipe]
    assert (one.kind, one.mode, one.threshold) == (kind, mode, threshold)
    assert one.source


def test_sweeps_publish_no_threshold():
    assert not any(one.recipe.startswith("sweep") for one in published())


def test_the_nearest_threshold_comes_first():
    near = nearest("norm", "vision", 3.0)
    assert near[0].recipe == "inception"
    assert {one.kind for one in near} == {"vision"}
    assert nearest("norm", "language", 0.2)[0].threshold == 0.25


def test_thresholds_of_another_mode_are_never_given():
    assert {one.mode for one in nearest("adaptive", "language", 0.1)} == {"adaptive"}
    assert nearest("norm", "other", None)
