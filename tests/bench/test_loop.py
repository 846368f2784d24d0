"""The record costs at most a tenth of a bare loop, on a network so small that everything shows."""

from pathlib import Path

import pytest

from tests.process import python

LOOP = Path(__file__).with_name("loop.py")


@pytest.mark.timing
def test_the_loop_costs_at_most_a_tenth_more_than_a_bare_one():
    # It exits with 1 above the limit.
    assert "ratio" in python(str(LOOP), "--pairs", "61", "--limit", "1.10").stdout
