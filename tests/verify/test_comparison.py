import math

import pytest
import torch

from runner.verify.comparison import (
    Compared,
    ComparedStep,
    SideMetrics,
    disagreements,
    presence,
    relative,
    tensor_errors,
)

FIGURES = SideMetrics(2.0, 1.0, 0.5, 1.0, 0.25, 2.0)


def compared(**changes):
    given = {
        "mode": "value",
        "threshold": 1.0,
        "derived": False,
        "steps": [ComparedStep(1, FIGURES, FIGURES, {"a": 1e-16, "b": 1e-12})],
        "weights": {"a": 3e-12, "b": 0.0},
    }
    return Compared(**(given | changes))


@pytest.mark.parametrize(
    ("ours", "reference", "error"),
    [
        (1.5, 1.0, 0.5),
        (-1.0, 1.0, 2.0),
        (0.0, 0.0, 0.0),
        (1e-300, 0.0, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, math.inf, 0.0),
    ],
)
def test_relative_error(ours, reference, error):
    assert relative(ours, reference) == error


def test_a_parameter_is_held_to_its_own_size_but_not_below_a_thousandth_of_the_largest():
    ours = {"large": torch.tensor([10.1, 0.0]), "small": torch.tensor([0.5])}
    reference = {"large": torch.tensor([10.0, 0.0]), "small": torch.tensor([1.0])}
    errors = tensor_errors(ours, reference)
    assert errors["large"] == pytest.approx(0.01, rel=1e-5)
    assert errors["small"] == pytest.approx(0.5)
    rounding = tensor_errors(
        {"g": torch.tensor([10.0]), "zero": torch.tensor([2e-17])},
        {"g": torch.tensor([10.0]), "zero": torch.tensor([1e-17])},
    )
    assert rounding["zero"] == pytest.approx(1e-15)


def test_an_absent_gradient_is_zeros():
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert tensor_errors({}, {"a": zeros, "b": ones})["a"] == 0.0
    assert tensor_errors({"b": ones}, {"a": ones, "b": ones}) == {"a": 1.0, "b": 0.0}
    assert tensor_errors({"a": ones, "b": ones}, {"b": ones})["a"] == 1000.0


def test_what_cannot_be_compared_is_infinitely_off():
    one = torch.ones(2)
    assert tensor_errors({"a": torch.ones(3)}, {"a": one})["a"] == math.inf
    assert tensor_errors({"a": one * math.nan}, {"a": one})["a"] == math.inf
    assert tensor_errors({"a": one}, {"a": one * math.nan})["a"] == math.inf


def test_rounding_is_no_failure():
    assert list(compared().failures(1e-9)) == []
    assert compared().largest == 3e-12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": {"a": 1e-8}}, "weights after the last step are off by 1e-08"),
        ({"weights": {"a": math.inf}}, "weights after the last step are off by inf"),
        ({"drifted": list("abcdefg")}, "the same bits: a, b, c, d, e and 2 more"),
    ],
)
def test_failures_of_a_mode(change, words):
    [said] = compared(**change).failures(1e-9)
    assert words in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"norm": 2.1}, ["‖G‖ of step 1 is off by 0.05"]),
        ({"norm_clipped": 1.1}, ["‖G‖ after clipping of step 1 is off by 0.1"]),
        # A count is right or wrong; one element of a million is no rounding.
        ({"fraction": 0.250001}, ["clip/fraction of step 1 is 0.250001 instead of 0.25"]),
    ],
)
def test_failures_of_a_step(changed, words):
    off = SideMetrics(**(vars(FIGURES) | changed))
    said = list(compared(steps=[ComparedStep(1, off, FIGURES, {})]).failures(1e-9))
    assert len(said) == len(words)
    assert all(expected in line for expected, line in zip(words, said, strict=True))


def test_a_gradient_on_one_side_alone_is_a_failure_even_if_it_is_zero():
    assert presence(1, "ab", "ab") == []
    said = presence(3, ["a", "b"], ["a", *"cdefgh"])
    assert said == [
        "in step 3, b: a gradient under the plugin, but none in one process",
        "in step 3, c, d, e, f, g and 1 more: a gradient in one process, but none under the plugin",
    ]
    step = ComparedStep(3, FIGURES, FIGURES, {"b": 0.0}, present=said)
    assert list(compared(steps=[step]).failures(1e-9)) == said


def test_the_worst_parameters_come_first_with_what_is_off():
    steps = [
        ComparedStep(1, FIGURES, FIGURES, {"a": 0.1}),
        ComparedStep(2, FIGURES, FIGURES, {"a": 0.3}),
    ]
    worst = compared(steps=steps, weights={"a": 0.2, "b": 0.25, **dict.fromkeys("cdefg", 0.0)})
    assert worst.worst()[:2] == [("a", 0.3, "gradient of step 2"), ("b", 0.25, "weight")]
    assert len(worst.worst()) == 5


def test_ranks_agree_to_the_bit_or_they_do_not():
    nan = SideMetrics(2.0, 1.0, 0.5, 1.0, 0.25, math.nan)
    assert disagreements(1, [nan, nan]) == []
    near = SideMetrics(math.nextafter(2.0, 3.0), 1.0, 0.5, 1.0, 0.25, math.nan)
    [said] = disagreements(4, [nan, nan, near])
    assert said == "norm of step 4 is 2.0000000000000004 on rank 2, 2.0 on rank 0"
