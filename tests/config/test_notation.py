import math

import pytest

from runner.config.duration import UNITS, Duration, Minutes, parse_interval
from runner.config.notation import clock, percent, plural, rounded


def test_numbers_shares_and_times_as_they_are_printed():
    texts = {0.0: "0", 0.25: "0.25", -0.12345: "-0.123", 12.345: "12.3", 1234.5: "1234"}
    texts |= {999_999: "999999", 1_234_567: "1.23e6", 2e6: "2e6", 0.0001: "0.0001"}
    texts |= {0.0000123: "1.23e-5", 0.9999: "1", 9.999: "10", -math.inf: "-inf", math.nan: "nan"}
    assert [rounded(value) for value in texts] == [*texts.values()]
    assert [rounded(x, 4) for x in (12.345, 0.000012345, 100.0)] == ["12.35", "1.234e-5", "100"]
    assert [plural(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert plural(1234, "step", ",") == "1,234 steps"
    shares = {0: "0 %", 1: "100 %", 0.0001: "under 0.1 %", 0.9999: "over 99.9 %", 0.992: "99.2 %"}
    assert {share: percent(share) for share in shares} == shares
    assert [clock(x) for x in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]


def test_a_duration_reads_what_it_prints():
    for value, unit in ((3, "ep"), (500, "ba"), (100_000, "sp"), (9, "tok")):
        duration = Duration.parse(f"{value:_}{unit}")
        assert (duration.value, duration.unit, str(duration)) == (value, unit, f"{value}{unit}")
        assert duration == parse_interval(str(duration)) == Duration(value, unit)
    assert parse_interval("1_000min") == parse_interval("1000min") == Minutes(1000)


WRONG = ["", "3", "ep", "0ep", "-1ep", "1.5ep", "3 ep", " 3ep", "3EP", "3epochs", "1__0ba", "_1ba"]


@pytest.mark.parametrize("text", [*WRONG, "1_ba", "10min", "0min", "min", "1.5min", "10m"])
def test_a_wrong_duration_is_refused_with_its_units(text):
    with pytest.raises(ValueError, match="must be a duration") as error:
        Duration.parse(text)
    assert all(f"{unit} ({meaning})" in str(error.value) for unit, meaning in UNITS.items())
    assert "minutes" not in str(error.value)
    if text not in ("10min", "0ep"):
        with pytest.raises(ValueError, match=r"must be a duration .* min \(minutes\)"):
            parse_interval(text)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
def test_a_duration_is_a_positive_integer_of_a_known_unit(value):
    with pytest.raises(ValueError, match="at least 1"):
        Duration(value, "ep")
    with pytest.raises(ValueError, match="optimizer steps"):
        Duration(1, "steps")
