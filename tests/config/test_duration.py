import pickle

import pytest

from runner.config.duration import UNITS, Duration, Minutes, parse_interval


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("3ep", 3, "ep"),
        ("500ba", 500, "ba"),
        ("100_000sp", 100000, "sp"),
        ("1000000tok", 1000000, "tok"),
    ],
)
def test_reads_what_it_prints(text, value, unit):
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert str(duration) == text.replace("_", "")
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "ep",
        "0ep",
        "-1ep",
        "1.5ep",
        "3 ep",
        " 3ep",
        "3EP",
        "3epochs",
        "1__0ba",
        "_1ba",
        "1_ba",
    ],
)
def test_refuses_and_lists_the_units(text):
    with pytest.raises(ValueError, match="must be a duration") as error:
        Duration.parse(text)
    for unit, meaning in UNITS.items():
        assert f"{unit} ({meaning})" in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
def test_a_duration_is_a_positive_integer(value):
    with pytest.raises(ValueError, match="at least 1"):
        Duration(value, "ep")


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError, match="optimizer steps"):
        Duration(1, "steps")


def test_travels_between_processes():
    assert pickle.loads(pickle.dumps(Duration(3, "ba"))) == Duration(3, "ba")


@pytest.mark.parametrize(
    ("text", "interval"),
    [("10min", Minutes(10)), ("1_000min", Minutes(1000)), ("500ba", Duration(500, "ba"))],
)
def test_an_interval_may_be_minutes(text, interval):
    assert parse_interval(text) == interval
    assert parse_interval(str(interval)) == interval


@pytest.mark.parametrize("text", ["0min", "min", "1.5min", "10m", "10 min", "-1min", None])
def test_an_interval_that_is_none_is_refused_with_its_units(text):
    with pytest.raises(ValueError, match=r"must be a duration .* min \(minutes\)"):
        parse_interval(text)


def test_a_duration_of_training_is_no_minutes():
    with pytest.raises(ValueError, match="must be a duration") as caught:
        Duration.parse("10min")
    assert "minutes" not in str(caught.value)
