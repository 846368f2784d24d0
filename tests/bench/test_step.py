"""``python -m runner bench step``: both sides of a row take the same steps; memory is counted."""

import math
import tempfile
from pathlib import Path

import pytest
import torch

from runner.bench.step import (
    CONTESTS,
    LESS_MEMORY,
    RIVALS,
    contest,
    peak_memory,
    recomputed,
    require_equal,
)
from runner.bench.timing import Setting
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("contests")  # the ranks run once

MEGABYTE = 2**20
KEPT = 3 * MEGABYTE
PASSING = 5 * MEGABYTE
EVERY = [(subject, name) for subject, names in CONTESTS.items() for name in names]


def rows_of(contests):
    """Rows of tiny models; a contest fails if its sides do not measure the same norms."""
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder), lambda words: None, quick=True, rounds=1)
        compared = [contest(subject, name, setting) for subject, name in contests]
        return [*compared, recomputed(setting)]


def make_and_step():
    with tempfile.TemporaryDirectory() as folder:
        return peak_memory(make_known, Path(folder))


def make_known():
    kept = torch.zeros(KEPT, dtype=torch.uint8)
    larger = torch.zeros(4 * KEPT, dtype=torch.uint8)  # while it is made, and not in steps
    del larger

    def step():
        passing = torch.zeros(PASSING, dtype=torch.uint8)
        del passing
        return kept

    return step


ONE = [("gpt", "tensor")]


def measured():
    return make_and_step(), rows_of(ONE)


@pytest.fixture(scope="module")
def ranks():
    """The peak of memory and the rows of one contest, on each of two ranks."""
    return run_ranks(measured, 2)


def require_rows(contests, rows_of_ranks):
    for *all_rows, _ in rows_of_ranks:
        for (_, name), (time, memory) in zip(contests, all_rows, strict=True):
            assert f", {name} over {RIVALS[name].against}" in time["what"]
            assert memory["what"] == f"{time['what']}, memory"
            assert all(math.isfinite(row["median"]) and row["median"] > 0 for row in (time, memory))


def test_the_peak_of_memory_is_taken_from_steps_alone(ranks):
    for peak, _ in ranks:
        assert peak == pytest.approx(KEPT + PASSING, abs=1000)


def test_a_contest_compares_time_and_memory(ranks):
    require_rows(ONE, [rows for _, rows in ranks])


def test_checkpointed_blocks_take_less_memory(ranks):
    for _, (*_, (_, memory)) in ranks:
        assert memory["median"] < LESS_MEMORY


@pytest.mark.slow
def test_every_row_of_the_table_is_measured():
    require_rows(EVERY, run_ranks(rows_of, 2, EVERY))


@pytest.mark.parametrize("ours", [1.1, math.nan])
def test_sides_that_take_other_steps_are_not_compared(ours):
    require_equal("gpt", [[1.0, 1.0001]])
    with pytest.raises(RuntimeError, match="gpt: both sides take other steps"):
        require_equal("gpt", [[1.0, 1.0], [1.0, ours]])
