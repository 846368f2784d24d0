"""``python -m runner bench scale``: what a rank receives grows with values, not with ranks."""

import pytest

from runner.bench.scale import MEGABYTE, MODES, Received, fake_ranks, of_ranks
from runner.gradients import Layout

SCALARS = 8
"""The most numbers of 8 bytes that each rank gathers from all others in a step."""


def received(ranks, parameters):
    """Megabytes by what is measured, without the number of ranks."""
    rows = of_ranks(ranks, parameters)
    return {row["what"].partition(" ranks, ")[2]: row["median"] for row in rows}


def test_more_ranks_add_no_more_than_a_handful_of_scalars():
    few = received(64, 80)
    many = received(1024, 80)
    assert few.keys() == many.keys()
    assert all(any(name in what for what in many) for name in MODES)
    for what, megabytes in many.items():
        # All but one part of an all-reduce comes from other ranks: 63 of 64, 1,023 of 1,024.
        bound = few[what] * (1023 / 1024) / (63 / 64)
        assert megabytes <= bound + SCALARS * 8 * 1024 / MEGABYTE, what


def test_a_gather_of_vectors_would_be_seen():
    with fake_ranks(1024) as group:
        layout = Layout([], group)
        counted = Received(1024)
        with counted:
            layout.totals([layout.number(1.0)] * 80)
    assert (counted.collectives, counted.bytes) == (1, 80 * 8 * 1023)


@pytest.mark.slow
def test_a_step_on_1024_ranks_with_10_000_parameters_receives_at_most_1_mb():
    for row in of_ranks(1024, 10_000, limits=True):
        # Rows of row-parallel matrices are units that ranks share, of which each is a value.
        if "tensor, adaptive" not in row["what"]:
            assert row["median"] <= row["limit"], row["what"]
