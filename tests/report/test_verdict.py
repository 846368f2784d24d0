"""What the page says of settings, and its differences against scipy's own tests."""

import json
import math
import shlex
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runner.report import read, write
from runner.report.findings import find
from runner.report.statistics import LEVEL, Difference, compare, holm
from runner.report.verdict import remarks, verdict
from runner.request.request import request
from tests.report.examples import NORM, config, rows, sweep, trained, write_run

NAN = math.nan
ACCURACY = {"objective": "eval/accuracy"}
MAXIMIZE = {"objective": "eval/loss", "direction": "maximize"}
UNPAIRED = {1.0: [(0, 0.30), (1, 0.32)], 2.0: [(2, 0.31), (3, 0.33)]}
CLEAR = {0.5: [0.100, 0.200, 0.300], 1.0: [0.151, 0.250, 0.349], None: [0.199, 0.301, 0.400]}
OPEN = {0.5: [0.10, 0.21, 0.28], 1.0: [0.12, 0.20, 0.30], None: [0.50, 0.62, 0.69]}


def findings_of(*arguments, **changes):
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
    findings = findings_of(tmp_path, losses, **changes)
    assert (findings.winner.label if findings.winner else None) == winner
    sentences = [verdict(findings)]
    for remark in remarks(findings):
        sentences += [remark.text, remark.command]
    text = " ".join(sentences)
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
    texts = [remark.text for remark in remarks(findings_of(tmp_path, losses))]
    assert [text for text in texts if "may do better" in text] == said


@pytest.fixture
def texts_of_short_runs(tmp_path):
    """The remarks on three runs whose summaries all say that they had too few steps."""
    trained(tmp_path, {0.1: [0.1], 0.5: [0.2], 2.0: [0.3]})
    few = {"topic": "few", "text": "20 steps are too few"}
    swept = {"topic": "x", "text": "swept"}  # not in the guidance, because the sweep answers it
    for file in tmp_path.glob("*/summary.json"):
        summary = json.loads(file.read_text())
        summary["guidance"] = [few["text"]]
        summary |= {"remarks": [1, few, swept], "clip/mode": {"clips": "bogus"}}  # a damaged file
        file.write_text(json.dumps(summary))
    return [remark.text for remark in remarks(find(read(tmp_path)))]


def test_a_remark_of_several_runs_is_given_once(texts_of_short_runs):
    assert texts_of_short_runs[0] == "norm 0.1 and 2 more settings: 20 steps are too few"
    assert "swept" not in " ".join(texts_of_short_runs)


def test_runs_of_few_steps_do_not_tell_where_to_look_next(texts_of_short_runs):
    assert "may do better" not in " ".join(texts_of_short_runs)


def test_a_run_cut_short_is_not_judged_beside_whole_ones(tmp_path):
    findings = findings_of(tmp_path, {1.0: [0.3], 2.0: [0.4]})
    before = findings.ratio(findings.groups[0])
    ahead = rows("norm", 4.0, 10, evaluations=0)
    ahead[-1]["eval/loss"] = 0.01
    write_run(tmp_path / "2", ahead, config(clip__threshold=4.0), state="running")
    write_run(tmp_path / "3", rows("norm", 1e-9, 5), config(seed=1), state="killed")
    findings = find(read(tmp_path))
    assert verdict(findings).startswith("clip=norm 1 ")
    assert findings.ratio(findings.groups[0]) == before


def test_a_threshold_without_a_result_closes_no_range(tmp_path):
    trained(tmp_path, {0.1: [0.2], 1.0: [0.1]})
    lines = rows("norm", 4.0, 5, evaluations=0)
    write_run(tmp_path / "2", lines, config(clip__threshold=4.0), state="interrupted")
    assert "highest with a result" in write(tmp_path).read_text()


def test_a_sweep_without_runs_has_a_page(tmp_path):
    (tmp_path / "sweep.json").write_text('{"name": "s", "runs": []}')
    assert "holds no run" in write(tmp_path).read_text()


def test_runs_without_rows_have_a_page(tmp_path):
    (tmp_path / "sweep.json").write_text('{"name": "s", "runs": []}')
    for number in range(2):
        seeded = config(seed=number)
        write_run(tmp_path / str(number), [], seeded, state="failed", error="no data")
    assert "no data" in write(tmp_path).read_text()
    assert "no data" in write(tmp_path / "0").read_text()


def test_the_command_for_more_seeds_keeps_the_runs_that_are_there(tmp_path):
    folder = sweep(tmp_path / "sweep", NORM[1:3], seeds=(0, 1), steps=40)
    findings = find(read(folder))
    [remark] = [remark for remark in remarks(findings) if remark.command]
    command = shlex.split(remark.command)
    assert command[:4] == ["python", "-m", "runner", "-m"]
    proposed = request(command[4:], multirun=True)
    assert proposed.sweep == json.loads((folder / "sweep.json").read_text())["name"]
    needed = min(difference.needed or 99 for difference in findings.rivals.values())
    assert sorted({job.config.seed for job in proposed.jobs}) == list(range(needed))
    many = request(shlex.split(findings.sweep.command_with(range(12)))[4:], multirun=True)
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
    means = [np.mean(list(scores.values())) for scores in settings]
    reference = int(np.argmin(means)) if chosen else 0
    for position, difference in compare(settings, reference, chosen=chosen).items():
        scores = list(settings[position].values())
        expected: Any = stats.ttest_rel(scores, list(settings[reference].values()))
        low, high = expected.confidence_interval(1 - 0.05 * 2 / 4 if chosen else LEVEL)
        assert (difference.low, difference.high) == pytest.approx((low, high), rel=1e-9)
        assert difference.seeds == seeds
        if not chosen:
            assert difference.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_holms_correction_is_that_of_a_textbook():
    # 0.005 x 4, 0.01 x 3, 0.03 x 2, and no value below one before it
    values = {0: 0.01, 1: 0.04, 2: 0.03, 3: 0.005}
    assert holm(values, 4) == pytest.approx({3: 0.02, 0: 0.03, 2: 0.06, 1: 0.06})


def test_the_seeds_that_are_needed_are_the_fewest_with_a_power_of_four_in_five():
    settings = scored([0.0, 2.0], 4, np.random.default_rng(0))
    difference = compare(settings, 0, chosen=False)[1]
    assert not difference.seen
    pairs = np.subtract(*(list(setting.values()) for setting in settings[::-1]))

    def power(shift, seeds):
        size = abs(shift) / pairs.std(ddof=1) * math.sqrt(seeds)
        return float(stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, size))

    needed = difference.needed
    assert power(pairs.mean(), needed) >= 0.8 > power(pairs.mean(), needed - 1)
    assert power(difference.visible, 4) == pytest.approx(0.8, abs=0.001)


SCORES = {"0": 1.0, "1": 2.0, "2": 4.0}
HIGHER = {"0": 2.0, "1": 3.5, "2": 4.5}


@pytest.mark.parametrize("lost", [SCORES | {"3": NAN}, {"0": math.inf}, {}])
def test_a_setting_with_a_lost_run_is_not_compared(lost):
    assert compare([SCORES, lost], 0, chosen=False) == {}
    assert compare([lost, SCORES], 0, chosen=False) == {}


def test_one_common_seed_gives_no_interval():
    assert compare([{"0": 1.0}, {"0": 2.0}], 0, chosen=False) == {1: Difference(1.0, 1)}


def test_seeds_that_only_one_setting_has_do_not_count():
    common = compare([SCORES, HIGHER], 0, chosen=False)
    assert compare([SCORES | {"3": 9.0}, HIGHER | {"4": -9.0}], 0, chosen=False) == common


def test_a_large_difference_of_two_seeds_needs_one_more():
    assert compare([{"0": 0.0, "1": 0.0}, {"0": 1.0, "1": 1.2}], 0, chosen=False)[1].needed == 3


def test_equal_scores_are_no_question_of_seeds():
    same = compare([SCORES, dict(SCORES)], 0, chosen=False)[1]
    assert (same.p, same.corrected, same.seen, same.visible, same.needed) == (1, 1, False, 0, None)


def test_a_difference_that_is_the_same_for_all_seeds_is_certain():
    higher = {seed: score + 1 for seed, score in SCORES.items()}
    shifted = compare([SCORES, higher], 0, chosen=False)[1]
    assert (shifted.low, shifted.high, shifted.p, shifted.seen) == (1.0, 1.0, 0.0, True)
