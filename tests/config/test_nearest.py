import pytest

from runner.config.check import owned_keys
from runner.config.nearest import nearest_keys, nearest_name, or_list

KEYS = [*owned_keys(), "optimizer.lr", "optimizer.momentum"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("clip.treshold", "clip.threshold"),
        ("threshold", "clip.threshold"),
        ("CLIP.Threshold", "clip.threshold"),
        ("optimizer.threshold", "clip.threshold"),
        ("lr", "optimizer.lr"),
        ("verfy.lr", "verify.lr"),
        ("tensor_parallel_size", "plugin.tp_size"),
        ("sed", "seed"),
        ("verify.tol", "verify.tolerance"),
        ("tol", "verify.tolerance"),
        ("plugin.dp", "plugin.dp_size"),
        ("train.max_durtion", "train.max_duration"),
        ("accumulation.step", "accumulation.steps"),
        ("max_grad_norm", "clip.threshold"),
        ("epochs", "train.max_duration"),
        ("training.learning_rate", "optimizer.lr"),
    ],
)
def test_the_key_that_was_meant_comes_first(wrong, right):
    assert nearest_keys(wrong, KEYS)[0] == right


def test_a_key_in_several_sections_names_them():
    assert set(nearest_keys("interval", KEYS)) == {"eval.interval", "log.interval"}


def test_nothing_is_near_to_nonsense():
    assert nearest_keys("qqqqqq.zzzzz", KEYS) == []
    assert nearest_name("qqqq", ["norm", "value"]) is None


@pytest.mark.parametrize(
    ("wrong", "names", "right"),
    [
        ("nrom", ["none", "norm", "value"], "norm"),
        ("Norm", ["none", "norm"], "norm"),
        ("gpu", ["auto", "cpu", "cuda"], "cuda"),
        ("half", ["fp32", "bf16", "fp16"], "fp16"),
    ],
)
def test_the_name_that_was_meant(wrong, names, right):
    assert nearest_name(wrong, names) == right


def test_lists_in_words():
    assert or_list(["a"]) == "a"
    assert or_list(["a", "b", "c"]) == "a, b or c"
