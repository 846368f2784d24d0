"""A few random kills; ``python -m tests.kills`` makes many."""

import random

from tests.kills import Killer


def test_a_run_that_is_killed_at_random_moments_ends_as_one_that_was_not(tmp_path):
    draw = random.Random(29)
    killer = Killer(tmp_path, [], draw)
    killer.go(3)
    assert sum(killer.kills.values()) == 3
