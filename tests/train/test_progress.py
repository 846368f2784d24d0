import math

import pytest

from runner.config.duration import Duration
from runner.train.progress import Progress, total_steps
from runner.train.windows import Windows


@pytest.mark.parametrize(
    ("duration", "expected"),
    [("3ep", 9), ("7ba", 7), ("77sp", 3), ("78sp", 4), ("154sp", 6), ("186sp", 7), ("1540tok", 6)],
)
def test_total_steps(duration, expected):
    steps = total_steps(Duration.parse(duration), 77, 32, tokens_per_sample=10)
    assert steps == expected


def test_tokens_of_data_without_tokens_are_unknown():
    assert total_steps(Duration.parse("10tok"), 77, 32) is None


def test_total_steps_agrees_with_counting():
    for text in ("1ep", "50sp", "100sp", "200sp"):
        duration, at = Duration.parse(text), Progress()
        while not at.reached(duration):
            for k in range(math.ceil(77 / 32)):
                if at.reached(duration):
                    break
                at = at.after(1, min(32, 77 - 32 * k), 0, end_of_epoch=k == 2)
        assert at.step == total_steps(duration, 77, 32)


def windows(loader, steps):
    return list(Windows(loader, steps).epoch(0))


def test_windows():
    got = [(w.first, w.batches, w.last) for w in windows("abcde", 2)]
    assert got == [(0, ["a", "b"], False), (2, ["c", "d"], False), (4, ["e"], True)]
    assert [w.last for w in windows("abcd", 2)] == [False, True]
    assert windows([], 2) == []


def test_an_interval_is_completed_once():
    interval, at, completed = Duration.parse("10sp"), Progress(), []
    for _ in range(8):
        before, at = at, at.after(1, 4, 0, end_of_epoch=False)
        completed.append(at.completed(interval, before))
    assert completed == [False, False, True, False, True, False, False, True]


def test_the_position_in_the_data_counts_microbatches_within_an_epoch():
    at = Progress().after(3, 24, 0, False).after(3, 24, 0, False)
    assert (at.epoch, at.batch, at.step) == (0, 6, 2)
    assert at.after(1, 8, 0, True) == Progress(epoch=1, batch=0, step=3, samples=56)
