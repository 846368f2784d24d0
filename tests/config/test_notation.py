import math

import pytest

from runner.config.notation import clock, percent, plural, rounded


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (1.0, "1"), (0.25, "0.25"), (-0.12345, "-0.123"), (12.345, "12.3")),
        *((1234.5, "1234"), (999_999, "999999"), (1_234_567, "1.23e6"), (2e6, "2e6")),
        *((0.0001, "0.0001"), (0.0000123, "1.23e-5"), (0.9999, "1"), (9.999, "10")),
        *((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert rounded(value) == text


def test_counts_shares_and_times_as_they_are_printed():
    assert [rounded(x, 4) for x in (12.345, 0.000012345, 100.0)] == ["12.35", "1.234e-5", "100"]
    assert [plural(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert plural(1234, "step", ",") == "1,234 steps"
    shares = {0: "0 %", 1: "100 %", 0.0001: "under 0.1 %", 0.9999: "over 99.9 %", 0.992: "99.2 %"}
    assert {share: percent(share) for share in shares} == shares
    assert [clock(x) for x in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
