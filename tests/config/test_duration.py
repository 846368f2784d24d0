import pickle

import pytest

from runner.config.duration import UNITS, Duration, Minutes, parse_interval


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [("3ep", 3, "ep"), ("500ba", 500, "ba"), ("100_000sp", 100000, "sp"), ("9tok", 9, "tok")],
)
def test_reads_what_it_prints(text, value, unit):
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert str(duration) == text.replace("_", "")
    assert pickle.loads(pickle.dumps(duration)) == duration == parse_interval(text)
    assert parse_interval("1_000min") == parse_interval("1000min") == Minutes(1000)


WRONG = ["", "3", "ep", "0ep", "-1ep", "1.5ep", "3 ep", " 3ep", "3EP", "3epochs", "1__0ba", "_1ba"]


@pytest.mark.parametrize("text", [*WRONG, "1_ba", "10min"])
def test_refuses_and_lists_the_units(text):
    with pytest.raises(ValueError, match="must be a duration") as error:
        Duration.parse(text)
    for unit, meaning in UNITS.items():
        assert f"{unit} ({meaning})" in str(error.value)
    assert "minutes" not in str(error.value)


@pytest.mark.parametrize("text", ["0min", "min", "1.5min", "10m", "10 min", "-1min", None])
def test_an_interval_that_is_none_is_refused_with_its_units(text):
    with pytest.raises(ValueError, match=r"must be a duration .* min \(minutes\)"):
        parse_interval(text)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
def test_a_duration_is_a_positive_integer_of_a_known_unit(value):
    with pytest.raises(ValueError, match="at least 1"):
        Duration(value, "ep")
    with pytest.raises(ValueError, match="optimizer steps"):
        Duration(1, "steps")
