"""What every mode has in common: its options, what it reports, and what survives a restart."""

import math

import pytest
import torch

from runner.clip import Decision, build
from runner.clip.mode import ClipMode
from tests.mode_names import NAMES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "the clipping threshold must be above 0, not 0.0"),
        ({"threshold": -1.0}, "the clipping threshold must be above 0, not -1.0"),
        ({"threshold": math.nan}, "the clipping threshold must be above 0, not nan"),
        ({"norm_type": 0.5}, "norm_type must be at least 1 (or inf), not 0.5"),
        ({"norm_type": math.nan}, "norm_type must be at least 1 (or inf), not nan"),
        ({"eps": 0.0}, "eps must be above 0, not 0.0"),
        ({"eps": math.nan}, "eps must be above 0, not nan"),
        (
            {"units": {"a.*": 0, "b": "1"}},
            "units of b must be the dimension that indexes outputs, or a list of dimensions, "
            "not '1'",
        ),
        (
            {"units": {"b": [0, True]}},
            "units of b must be the dimension that indexes outputs, or a list of dimensions, "
            "not [0, True]",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        build("adaptive", **options)
    assert str(raised.value) == message


def test_options_at_the_edge_of_their_range_are_taken():
    mode = build("adaptive", threshold=1e-300, norm_type=1.0, eps=1e-300)
    assert (mode.limit, mode.norm_type, mode.eps) == (1e-300, 1.0, 1e-300)
    assert build("norm", threshold=math.inf, norm_type=math.inf).limit == math.inf


@pytest.mark.parametrize("name", ["norm", "value", "adaptive"])
def test_a_mode_without_its_threshold_says_so(name):
    with pytest.raises(ValueError, match=r"^this clipping mode needs a threshold$"):
        _ = build(name).limit


def test_an_unknown_mode_lists_those_there_are():
    for name in ("agc", "layout", "os.path", "a b"):
        with pytest.raises(ValueError, match=r"^unknown clipping mode '") as raised:
            build(name)
        assert str(raised.value) == (
            f"unknown clipping mode {name!r}: use {', '.join(NAMES[:-1])} or {NAMES[-1]}"
        )


def test_the_threshold_survives_a_restart():
    mode, other = build("norm", threshold=0.5), build("norm", threshold=1.0)
    assert mode.state_dict() == {"threshold": 0.5}
    other.load_state_dict(mode.state_dict())
    assert isinstance(other, ClipMode)
    assert other.limit == 0.5


def test_what_a_step_without_clipping_reports():
    decision = Decision.untouched(2.0, 3.0, 1.5)
    assert decision.metrics == (2.0, 2.0, 1.0, 0.0, 0.0, 1.5, 3.0)
    assert decision.finite is True
    assert math.isnan(Decision.untouched(2.0, None, 1.5).threshold)


@pytest.mark.parametrize("threshold", [3.0, None])
def test_what_a_skipped_step_reports(threshold):
    decision = Decision.skipped(math.inf, threshold)
    nan = pytest.approx(math.nan, nan_ok=True)
    assert decision.metrics == (math.inf, nan, nan, 0.0, 0.0, nan, threshold or nan)
    assert decision.finite is False
    yes, no = torch.tensor(True), torch.tensor(False)
    taken = Decision.untouched(torch.tensor(2.0), threshold, torch.tensor(1.5))
    assert tuple(map(float, taken.where(no).metrics)) == (
        (2.0, nan, nan, 0.0, 0.0, nan, threshold or nan)
    )
    clipped = Decision(*(torch.tensor(x) for x in (2.0, 1.0, 0.5, 1.0, 0.25, 3.0)), 1.0)
    assert tuple(map(float, clipped.where(yes).metrics)) == tuple(map(float, clipped.metrics))
    assert tuple(map(float, clipped.where(no).metrics)) == (2.0, nan, nan, 0, 0, nan, 1.0)
    assert clipped.where(no).finite is no
