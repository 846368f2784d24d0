"""What the page says of settings, and its differences against scipy's own tests."""

import json
import math
import re
import shlex
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runner.config.request import request
from runner.report import read, write
from runner.report.findings import find
from runner.report.statistics import LEVEL, Difference, compare, holm
from runner.report.verdict import remarks, verdict
from tests.report.examples import NORM, config, rows, sweep, trained, write_run

NAN = math.nan
ACCURACY = {"objective": "eval/accuracy"}
MAXIMIZE = {"objective": "eval/loss", "direction": "maximize"}
UNPAIRED = {1.0: [(0, 0.30), (1, 0.32)], 2.0: [(2, 0.31), (3, 0.33)]}
CLEAR = {0.5: [0.100, 0.200, 0.300], 1.0: [0.151, 0.250, 0.349], None: [0.199, 0.301, 0.400]}
OPEN = {0.5: [0.10, 0.21, 0.28], 1.0: [0.12, 0.20, 0.30], None: [0.50, 0.62, 0.69]}


def made(*arguments, **changes):
    return find(read(trained(*arguments, **changes)))


def case(losses, *said, winner=None, **changes):
    return losses, said, winner, changes


@pytest.mark.parametrize(
    ("losses", "said", "winner", "changes"),
    [
        case(CLEAR, "wins with", "0.2 ± 0.1 over 3", "95 % interval +0", winner="norm 0.5"),
        case(OPEN, "gave the lowest", "Undecided: no difference to norm 1 could be", "more seed"),
        # Other seeds are no pairs.
        case(UNPAIRED, "0.31 ± 0.014 over 2", "at most one seed in common"),
        case({0.1: [0.5], 1.0: [0.3], None: [0.4]}, "clip=norm 1", "against 0.4 without"),
        case({0.1: [0.5], None: [0.4]}, "No clipping gave the lowest", "0.4, against 0.5 with"),
        case({0.5: [0.2, 0.3], 1.0: [0.2, 0.3]}, "norm 0.5, clip=norm 1 share the lowest"),
        case(CLEAR, "the highest eval/loss", winner="none", sweep=MAXIMIZE),
        case({1.0: [0.5], 2.0: [0.9]}, "clip=norm 2 gave the highest", sweep=ACCURACY),
        # The first setting lacks the seed on which both are bad.
        case({0.5: [0.2, 0.3, 0.4], 1.0: [0.1, 0.201, 0.299, 9.0]}),
        case({1.0: [(0, 1.0), (0, 1.0), (1, 2.0)], 2.0: [(0, 1.2), (1, 1.7)]}, "1.45", "2 seeds"),
        case({1.0: [0.3], 2.0: [0.4], 4.0: [NAN]}, "clip=norm 1 gave", "diverged in 1 of 3"),
        case(CLEAR | {8.0: [0.1, NAN, 0.1]}, winner="norm 0.5"),
        case({1.0: [0.3, NAN], 2.0: [0.4, NAN]}, "No answer yet: no setting has a finite mean"),
        case({1.0: [0.3, 0.2, 0.4]}, "One setting, 3 runs: "),
        case(CLEAR, state="running"),
    ],
)
def test_the_verdict(losses, said, winner, changes, tmp_path):
    found = made(tmp_path, losses, **changes)
    assert (found.winner.label if found.winner else None) == winner
    text = " ".join([verdict(found), *(part for one in remarks(found) for part in one)])
    assert [part for part in said if part not in text] == [], text
    assert not (winner and "Undecided" in text)


LOWEST = "best clip.threshold, 0.1, is the lowest with a result: a lower one may do better"
LOWEST += " (try 0.05 and 0.025)."
HIGHEST = "best clip.threshold, 2, is the highest with a result: a higher one may do better"
HIGHEST += " (try 4 and clip=none)."
RATE = "best optimizer.lr, 0.5, is the highest with a result: a higher one may do better"
RATE += " (try 1 and 2)."
BOTH = [f"With optimizer.lr=0.5 the {LOWEST}", f"With clip.threshold=0.1 the {RATE}"]
RATES = {(0.1, 0.02): [0.3], (0.1, 0.1): [0.2], (0.1, 0.5): [0.1]}


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({0.1: [0.3], 0.5: [0.1], 2.0: [0.2]}, []),
        ({0.1: [0.1], 0.5: [0.2], 2.0: [0.3]}, [f"The {LOWEST}"]),
        ({0.1: [0.3], 0.5: [0.2], 2.0: [0.1]}, [f"The {HIGHEST}"]),
        ({0.5: [0.3], 2.0: [0.2], 90.0: [0.1]}, []),  # it clips nothing
        (RATES, [f"The {RATE}"]),
        (RATES | {(1.0, 0.02): [0.5], (1.0, 0.1): [0.4], (1.0, 0.5): [0.3]}, BOTH),
        # Thresholds differ by less than their seeds, or by as much in each seed.
        ({0.1: [0.30, 0.35, 0.28], 0.5: [0.31, 0.27, 0.36], 2.0: [0.32, 0.30, 0.33]}, []),
        ({0.1: [0.30, 0.35, 0.40], 0.5: [0.31, 0.361, 0.41]}, [f"The {LOWEST}"]),
        ({0.1: [0.2], 0.5: [0.1], 8.0: [NAN]}, []),
    ],
)
def test_the_best_value_at_an_end_of_those_tried(losses, said, tmp_path):
    texts = [one.text for one in remarks(made(tmp_path, losses))]
    assert [text for text in texts if "may do better" in text] == said


def test_what_runs_remark_is_said_once_and_few_steps_tell_no_end(tmp_path):
    made(tmp_path, {0.1: [0.1], 0.5: [0.2], 2.0: [0.3]})
    for file in tmp_path.glob("*/summary.json"):
        own = [{"topic": "few", "text": "20 steps are too few"}, {"topic": "x", "text": "swept"}]
        summary = {**json.loads(file.read_text()), "remarks": own, "guidance": [own[0]["text"]]}
        summary |= {"remarks": [1, *own], "clip/mode": {"clips": "bogus"}}  # a damaged file
        file.write_text(json.dumps(summary))
    texts = [one.text for one in remarks(find(read(tmp_path)))]
    assert texts[0] == "norm 0.1 and 2 more settings: 20 steps are too few"
    assert not re.search("may do better|swept", " ".join(texts))


def test_a_run_cut_short_is_not_judged_beside_whole_ones(tmp_path):
    found = made(tmp_path, {1.0: [0.3], 2.0: [0.4]})
    before = found.ratio(found.groups[0])
    ahead = rows("norm", 4.0, 10, evaluations=0)
    ahead[-1]["eval/loss"] = 0.01
    write_run(tmp_path / "2", ahead, config(clip__threshold=4.0), state="running")
    write_run(tmp_path / "3", rows("norm", 1e-9, 5), config(seed=1), state="killed")
    found = find(read(tmp_path))
    assert verdict(found).startswith("clip=norm 1 ")
    assert found.ratio(found.groups[0]) == before
    # A threshold without a result closes no range.
    made(tmp_path / "edge", {0.1: [0.2], 1.0: [0.1]})
    ended = rows("norm", 4.0, 5, evaluations=0)
    write_run(tmp_path / "edge" / "2", ended, config(clip__threshold=4.0), state="interrupted")
    page = write(tmp_path / "edge").read_text()
    assert "highest with a result" in page


def test_no_runs_and_runs_without_rows_have_a_page(tmp_path):
    (tmp_path / "sweep.json").write_text('{"name": "s", "runs": []}')
    assert "holds no run" in write(tmp_path).read_text()
    for number in range(2):
        of = config(seed=number)
        write_run(tmp_path / str(number), [], of, state="failed", error="no data")
    assert "no data" in write(tmp_path).read_text()
    assert "no data" in write(tmp_path / "0").read_text()


def test_the_command_for_more_seeds_keeps_the_runs_that_are_there(tmp_path):
    folder = sweep(tmp_path / "sweep", NORM[1:3], seeds=(0, 1), steps=40)
    found = find(read(folder))
    [note] = [one for one in remarks(found) if one.command]
    command = shlex.split(note.command)
    assert command[:4] == ["python", "-m", "runner", "-m"]
    asked = request(command[4:], multirun=True)
    assert asked.sweep == json.loads((folder / "sweep.json").read_text())["name"]
    needed = min(one.needed or 99 for one in found.rivals.values())
    assert sorted({job.config.seed for job in asked.jobs}) == list(range(needed))
    many = request(shlex.split(found.sweep.command_with(range(12)))[4:], multirun=True)
    assert (many.lists["seed"], len(many.jobs)) == ("seed=range(12)", 4 * 12)


def scored(means, seeds, random):
    """Scores of settings: each has its mean, and each seed adds its own to all of them."""
    of_seed = random.normal(0, 3, seeds)
    noise = random.normal(0, 1, (len(means), seeds))
    return [
        {str(seed): mean + of_seed[seed] + noise[i, seed] for seed in range(seeds)}
        for i, mean in enumerate(means)
    ]


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_pairs_agree_with_scipy(seeds, chosen):
    """Against the best, the level of an interval rises with the number of settings."""
    settings = scored([0.0, 0.1, 0.5, 3.0], seeds, np.random.default_rng(seeds))
    first = int(np.argmin([np.mean(list(one.values())) for one in settings])) if chosen else 0
    found = compare(settings, first, chosen=chosen)
    for position, one in found.items():
        pair = [list(settings[i].values()) for i in (position, first)]
        expected: Any = stats.ttest_rel(*pair)
        low, high = expected.confidence_interval(1 - 0.05 * 2 / 4 if chosen else LEVEL)
        assert (one.low, one.high) == pytest.approx((low, high), rel=1e-9)
        assert one.seeds == seeds
        if not chosen:
            assert one.p == pytest.approx(expected.pvalue, rel=1e-9)
    # A textbook's example: 0.005 x 4, 0.01 x 3, 0.03 x 2, and no value below one before it.
    values = {0: 0.01, 1: 0.04, 2: 0.03, 3: 0.005}
    assert holm(values, 4) == pytest.approx({3: 0.02, 0: 0.03, 2: 0.06, 1: 0.06})


def test_the_seeds_that_are_needed_are_the_fewest_with_a_power_of_four_in_five():
    settings = scored([0.0, 2.0], 4, np.random.default_rng(0))
    one = compare(settings, 0, chosen=False)[1]
    assert not one.seen
    pairs = np.subtract(*(list(setting.values()) for setting in settings[::-1]))

    def power(shift, seeds):
        size = abs(shift) / pairs.std(ddof=1) * math.sqrt(seeds)
        return float(stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, size))

    assert power(pairs.mean(), one.needed) >= 0.8 > power(pairs.mean(), one.needed - 1)
    assert power(one.visible, 4) == pytest.approx(0.8, abs=0.001)


def test_missing_seeds_ties_and_certain_differences():
    one, other = {"0": 1.0, "1": 2.0, "2": 4.0}, {"0": 2.0, "1": 3.5, "2": 4.5}
    for lost in (one | {"3": math.nan}, {"0": math.inf}, {}):
        assert compare([one, lost], 0, chosen=False) == compare([lost, one], 0, chosen=False) == {}
    assert compare([{"0": 1.0}, {"0": 2.0}], 0, chosen=False) == {1: Difference(1.0, 1)}
    whole = compare([one, other], 0, chosen=False)
    assert compare([one | {"3": 9.0}, other | {"4": -9.0}], 0, chosen=False) == whole
    assert compare([{"0": 0.0, "1": 0.0}, {"0": 1.0, "1": 1.2}], 0, chosen=False)[1].needed == 3
    same = compare([one, dict(one)], 0, chosen=False)[1]
    assert (same.p, same.corrected, same.seen, same.visible, same.needed) == (1, 1, False, 0, None)
    shifted = compare([one, {seed: score + 1 for seed, score in one.items()}], 0, chosen=False)[1]
    assert (shifted.low, shifted.high, shifted.p, shifted.seen) == (1.0, 1.0, 0.0, True)
