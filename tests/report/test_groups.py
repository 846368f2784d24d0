from __future__ import annotations

import math
from typing import Any

import pytest

from runner.report.groups import choice, differences, grouped, label, mean_and_spread
from runner.report.run import Run, flat
from tests.report.examples import config


def run(number: int, *words: str, **changes: Any) -> Run:
    return Run(
        folder=None,
        number=str(number),
        state="finished",
        config=flat(config(**changes)),
        overrides=words,
    )


def test_seeds_of_one_setting_are_one_group() -> None:
    runs = [run(i, clip__threshold=t, seed=s) for i, (t, s) in enumerate([(1, 0), (2, 0), (1, 1)])]
    groups = grouped(runs, differences(runs).columns)
    assert [[one.number for one in group.runs] for group in groups] == [["0", "2"], ["1"]]
    assert [group.label for group in groups] == ["norm 1", "norm 2"]


def test_where_a_run_is_kept_and_shown_makes_no_other_setting() -> None:
    runs = [run(0, tracker={"name": "wandb"}), run(1, tracker={"name": "none"}, seed=1)]
    assert len(grouped(runs, ())) == 1
    assert differences(runs).columns == ("seed",)


def test_thresholds_rise_within_a_mode_and_no_clipping_comes_last() -> None:
    modes = [("none", None), ("norm", 10.0), ("norm", 9.0), ("value", 0.1), ("norm", 0.25)]
    runs = [run(i, clip__mode=m, clip__threshold=t) for i, (m, t) in enumerate(modes)]
    labels = [group.label for group in grouped(runs, differences(runs).columns)]
    assert labels == ["norm 0.25", "norm 9", "norm 10", "value 0.1", "none"]


def test_each_setting_of_a_mode_has_its_colour() -> None:
    runs = [run(i, clip__threshold=t) for i, t in enumerate((0.1, 0.25, 1.0, 2.0))]
    colors = [group.color for group in grouped(runs, ("clip.threshold",))]
    assert len(set(colors)) == 4

    def brightness(color: str) -> float:
        return sum(int(color[i : i + 2], 16) * w for i, w in ((1, 0.2), (3, 0.7), (5, 0.1)))

    # Viridis: brighter as thresholds rise, so that the order shows without hues too.
    assert [brightness(c) for c in colors] == sorted(map(brightness, colors))


def test_only_what_differs_is_a_column_and_the_clip_comes_first() -> None:
    runs = [
        run(0, "optimizer.lr=0.1", optimizer__lr=0.1, clip__threshold=1),
        run(1, "optimizer.lr=0.2", optimizer__lr=0.2, clip__threshold=2, seed=1),
    ]
    assert differences(runs).columns == ("clip.threshold", "optimizer.lr", "seed")


def test_a_chosen_group_is_one_column_and_what_it_implies_is_named_apart() -> None:
    adam = {"_target_": "torch.optim.Adam", "lr": 0.001, "betas": [0.9, 0.95]}
    runs = [run(0), run(1, "optimizer=adam", optimizer=adam)]
    found = differences(runs)
    assert found.columns == ("optimizer",)
    assert "optimizer.lr" in found.others
    assert [choice(one, "optimizer") for one in runs] == ["SGD", "adam"]
    assert label(runs[1], found.columns) == "norm 1, optimizer=adam"


def test_too_many_columns_are_cut_and_named() -> None:
    many = {f"k{i}": 0 for i in range(20)}
    runs = [run(0, model=many), run(1, model=dict.fromkeys(many, 1), seed=1)]
    found = differences(runs)
    assert len(found.columns) <= 9
    assert len([*found.columns, *found.others]) == 21


def test_numbers_are_ordered_by_size_in_every_key() -> None:
    runs = [run(i, accumulation__steps=n) for i, n in enumerate((16, 2, 8))]
    labels = [group.label for group in grouped(runs, differences(runs).columns)]
    assert labels == ["norm 1, steps=2", "norm 1, steps=8", "norm 1, steps=16"]


def test_mean_and_sample_deviation() -> None:
    assert mean_and_spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_and_spread([5.0]) == (5.0, None)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_lost_seed_is_not_averaged_away(lost: float) -> None:
    mean, spread = mean_and_spread([1.0, lost])
    assert math.isnan(mean)
    assert spread is None
