import pytest

from runner.config.duration import UNITS, Duration


def test_a_duration_reads_what_it_prints():
    for value, unit in ((3, "ep"), (500, "ba"), (100_000, "sp"), (9, "tok")):
        duration = Duration.parse(f"{value:_}{unit}")
        assert (duration.value, duration.unit, str(duration)) == (value, unit, f"{value}{unit}")
        assert duration == Duration.parse_interval(str(duration)) == Duration(value, unit)
    assert (
        Duration.parse_interval("1_000min")
        == Duration.parse_interval("1000min")
        == Duration(1000, "min")
    )


WRONG = ["", "3", "ep", "0ep", "-1ep", "1.5ep", "3 ep", " 3ep", "3EP", "3epochs", "1__0ba", "_1ba"]


@pytest.mark.parametrize("text", [*WRONG, "1_ba", "10min", "0min", "min", "1.5min", "10m"])
def test_a_wrong_duration_is_refused_with_its_units(text):
    with pytest.raises(ValueError, match="must be a duration") as error:
        Duration.parse(text)
    assert all(f"{unit} ({meaning})" in str(error.value) for unit, meaning in UNITS.items())
    assert "minutes" not in str(error.value)
    if text not in ("10min", "0ep"):
        with pytest.raises(ValueError, match=r"must be a duration .* min \(minutes\)"):
            Duration.parse_interval(text)
