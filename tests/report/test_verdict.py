"""What the page says of settings whose truth is known, and its statistics against scipy's own."""

import json
import math
import shlex
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from runner.report import read, write
from runner.report.edges import edge
from runner.report.findings import find
from runner.report.remarks import remarks
from runner.report.statistics import Difference, compare, limit, tail
from runner.report.verdict import verdict
from runner.request.request import request
from runner.run_folder.status import Entry, SweepRecord
from tests.report.examples import NORM, config, rows, sweep, trained, write_run

NAN = math.nan
ACCURACY = {"objective": "eval/accuracy"}
MAXIMIZE = {"objective": "eval/loss", "direction": "maximize"}
UNPAIRED = {1.0: [(0, 0.30), (1, 0.32)], 2.0: [(2, 0.31), (3, 0.33)]}
CLEAR = {0.5: [0.100, 0.200, 0.300], 1.0: [0.151, 0.250, 0.349], None: [0.199, 0.301, 0.400]}
OPEN = {0.5: [0.10, 0.21, 0.28], 1.0: [0.12, 0.20, 0.30], None: [0.50, 0.62, 0.69]}
TIED = {0.5: [0.10, 0.20, 0.30], 1.0: [0.101, 0.197, 0.303], None: [0.30, 0.41, 0.49]}
AT_A_RATE = {
    (0.25, 0.1): [0.30, 0.41, 0.50],
    (1.0, 0.1): [0.31, 0.40, 0.495],
    (0.25, 0.4): [0.10, 0.21, 0.30],
    (1.0, 0.4): [0.60, 0.71, 0.80],
}


def findings_of(*arguments, **changes):
    return find(read(trained(*arguments, **changes)))


def case(losses, title, *said, winner=None, **changes):
    return losses, title, said, winner, changes


@pytest.mark.parametrize(
    ("losses", "title", "said", "winner", "changes"),
    [
        case(CLEAR, "Which threshold? 0.5 is best", "0.2 ± 0.1 over 3 seeds", winner="0.5"),
        case(CLEAR, "Which threshold? none is best", winner="none", sweep=MAXIMIZE),
        case(TIED, "Which threshold? 0.5 and 1.0 are a tie", "1.0 – tie; none – clearly worse"),
        case(OPEN, "Which threshold? 0.5 and 1.0 are a tie", "none – clearly worse"),
        case(
            {0.5: [0.10, 0.21], 1.0: [0.11, 0.20], 2.0: [0.115, 0.225]},
            "Which threshold? 0.5 and 1.0 are a tie; 2.0 needs more seeds",
            "1.0 – tie; 2.0 – too few seeds to tell: 6 more would",
        ),
        case(
            {1.0: [0.1, 0.2], 2.0: [0.3, 0.25], 4.0: [0.3, 0.42]},
            "Which threshold? Too few seeds to tell 1.0 from 2.0",
            "2.0 – too few seeds to tell: 6 more would; 4.0 – probably worse",
        ),
        case(
            {1.0: [0.1, 0.2, 0.3], 2.0: [0.18, 0.31, 0.38]},
            "Which threshold? 1.0 is best",
            winner="1.0",
        ),
        # All equal: thresholds that no step reached
        case(
            {90.0: [0.2, 0.3], 99.0: [0.2, 0.3]},
            "No threshold clipped a step: these runs are identical",
        ),
        case({0.5: [0.2, 0.3], 1.0: [0.2, 0.3]}, "All settings gave the same result"),
        # Other seeds are no pairs
        case(UNPAIRED, "1.0 did best, but settings have fewer than two seeds", "may be chance"),
        case({0.1: [0.5], 1.0: [0.3]}, "Which threshold? 1.0 did best, in one seed", "against 0.5"),
        case({1.0: [0.5], 2.0: [0.9]}, "2.0 did best, in one seed", sweep=ACCURACY),
        # The first setting lacks the seed on which both are bad
        case({0.5: [0.2, 0.3, 0.4], 1.0: [0.1, 0.201, 0.299, 9.0]}, "not on the common seeds"),
        case({1.0: [(0, 1.0), (0, 1.0), (1, 2.0)], 2.0: [(0, 1.2), (1, 1.7)]}, "", "1.45"),
        case({1.0: [0.3], 2.0: [0.4], 4.0: [NAN]}, "1.0 did best", "Diverged: 4.0 (1 of 1 seed)"),
        case(CLEAR | {8.0: [0.1, NAN, 0.1]}, "0.5 is best", "8.0 (1 of 3 seeds)", winner="0.5"),
        case({1.0: [0.3, NAN], 2.0: [0.4, NAN]}, "Every setting diverged", "1.0 (1 of 2 seeds)"),
        case({1.0: [0.3, 0.2, 0.4]}, "One setting, 3 seeds: eval/loss 0.3 ± 0.1"),
        case(
            AT_A_RATE,
            "Which setting? 0.25 · lr 0.4 is best",
            "The threshold makes a difference at learning rate 0.4 alone",
            winner="0.25 · lr 0.4",
        ),
        case(CLEAR, "0.5 is best so far", state="running"),
    ],
)
def test_the_verdict(losses, title, said, winner, changes, tmp_path):
    findings = findings_of(tmp_path, losses, **changes)
    answer = verdict(findings)
    assert title in answer.title
    assert (findings.winner.label if findings.winner else None) == winner
    text = " ".join([*answer.sentences, *remarks(findings)])
    assert [part for part in said if part not in text] == [], text


LOWEST = "best clip.threshold, 0.1, is the lowest with a result: a lower one may do better"
LOWEST += " (try 0.05 and 0.025)."
HIGHEST = "best clip.threshold, 2, is the highest with a result: a higher one may do better"
HIGHEST += " (try 4 and 8)."
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
    findings = findings_of(tmp_path, losses)
    edges = [edge(findings, key) for key in ("clip.threshold", "optimizer.lr")]
    assert [text for text in edges if text] == said


def test_a_run_that_has_not_begun_is_named_by_what_was_typed(tmp_path):
    folder = sweep(tmp_path / "s", NORM[:1], steps=5)
    record = SweepRecord.read(folder)
    record.entries[0].words = record.entries[0].overrides = ["model.width=8"]
    waiting = ["model.width=16"]
    record.entries.append(Entry(1, "1", waiting, waiting, "4567cdef"))
    record.write(folder)
    overrides = folder / "0" / ".hydra" / "overrides.yaml"
    overrides.write_text("[model.width=8]")
    begun = config(clip__mode="norm", clip__threshold=0.1, model__width=8)
    (folder / "0" / "config.yaml").write_text(yaml.safe_dump(begun))
    findings = find(read(folder))
    assert [setting.label for setting in findings.settings] == ["8", "16"]


def test_loops_of_ones_own_that_took_fewer_steps_are_told_apart(tmp_path):
    for name, steps in (("short", 3), ("long", 100)):
        lines = [
            {"train/step": step, "train/loss": 1.0, "grad/norm": 1.0}
            for step in range(1, steps + 1)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    texts = remarks(find(read(tmp_path)))
    assert any("from 3 to 100 steps" in text for text in texts), texts


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
    return remarks(find(read(tmp_path)))


def test_a_remark_of_several_runs_is_given_once(texts_of_short_runs):
    assert texts_of_short_runs[0] == "0.1 and 2 more settings: 20 steps are too few"
    assert "swept" not in " ".join(texts_of_short_runs)


def test_runs_of_few_steps_do_not_tell_where_to_look_next(texts_of_short_runs):
    assert "may do better" not in " ".join(texts_of_short_runs)


def test_a_run_cut_short_is_not_judged_beside_whole_ones(tmp_path):
    findings = findings_of(tmp_path, {1.0: [0.3], 2.0: [0.4]})
    before = findings.scores.ratio(findings.settings[0])
    ahead = rows("norm", 4.0, 10, evaluations=0)
    ahead[-1]["eval/loss"] = 0.01
    write_run(tmp_path / "2", ahead, config(clip__threshold=4.0), state="running")
    write_run(tmp_path / "3", rows("norm", 1e-9, 5), config(seed=1), state="killed")
    findings = find(read(tmp_path))
    assert findings.best.label == "1.0"
    assert findings.scores.ratio(findings.settings[0]) == before


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
    answer = verdict(findings)
    command = shlex.split(answer.command)
    assert command[:4] == ["python", "-m", "runner", "-m"]
    proposed = request(command[4:], multirun=True)
    assert proposed.sweep == json.loads((folder / "sweep.json").read_text())["name"]
    needed = max(difference.needed or 0 for difference in findings.rivals.values())
    assert sorted({job.config.seed for job in proposed.jobs}) == list(range(needed))
    many = request(shlex.split(findings.sweep.command_with(range(12)))[4:], multirun=True)
    assert (many.lists["seed"], len(many.jobs)) == ("seed=range(12)", 4 * 12)


def test_branches_are_offered_no_other_seeds(tmp_path):
    folder = sweep(tmp_path / "s", NORM[1:3], steps=40)
    for file in folder.glob("*/config.yaml"):
        file.write_text(f"{file.read_text()}resume: {{from: parent@20}}\n")
    answer = verdict(find(read(folder)))
    assert "seed=" not in answer.command  # a branch of another seed is refused
    assert "another seed" in " ".join(answer.sentences)


def test_a_single_run_proposes_thresholds_at_its_norms(tmp_path):
    folder = write_run(tmp_path / "run", rows(), config(), overrides=("clip=norm", "seed=0"))
    answer = verdict(find(read(folder)))
    assert answer.title == "The threshold 1.0 clipped 27.5\u00a0% of 400 steps"
    proposed = request(shlex.split(answer.command)[4:], multirun=True)
    thresholds = sorted({job.config.clip.threshold for job in proposed.jobs})
    norms = [row["grad/norm"] for row in rows()]
    assert thresholds == pytest.approx(np.percentile(norms, (50, 90, 99)), rel=0.05)


def test_a_run_with_a_rule_for_spikes_says_how_many_steps_it_left_out(tmp_path):
    lines = rows()
    for number, row in enumerate(lines):
        row["clip/skipped"] = number // 100
    summary = {"clip/skipped": 3, "grad/nonfinite": 2}
    folder = write_run(tmp_path / "run", lines, config(), overrides=("clip.skip=spike",))
    file = folder / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | summary))
    text = " ".join(verdict(find(read(folder))).sentences)
    assert "5 steps left out: 3 as spikes (clip.skip) and 2 because their gradient" in text


# ---- The statistics ------------------------------------------------------------------------------


def scored(means, seeds, random, noise=1.0):
    """Scores of settings: each has its mean, and each seed adds its own to all of them."""
    of_seed = random.normal(0, 3, seeds)
    table = np.asarray(means)[:, None] + of_seed
    table = table + random.normal(0, 1, (len(means), seeds)) * np.reshape(noise, (-1, 1))
    return [dict(enumerate(scores)) for scores in table.tolist()]


@pytest.mark.parametrize(("count", "degrees"), [(2, 1), (3, 4), (5, 16), (22, 42)])
def test_the_studentized_range_is_scipys(count, degrees):
    expected: Any = stats.studentized_range
    assert limit(count, degrees) == pytest.approx(expected.ppf(0.95, count, degrees), rel=1e-8)
    assert tail(4.0, count, degrees) == pytest.approx(expected.sf(4.0, count, degrees), abs=1e-9)


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_two_settings_are_compared_by_the_paired_t_test(seeds):
    first, second = scored([0.0, 0.5], seeds, np.random.default_rng(seeds))
    difference = compare([first, second], 0)[1]
    expected: Any = stats.ttest_rel([*second.values()], [*first.values()])
    assert difference.p == pytest.approx(expected.pvalue, rel=1e-7)
    assert (difference.low, difference.high) == pytest.approx(expected.confidence_interval(0.95))


def test_several_settings_are_compared_by_tukeys_test_in_blocks():
    settings = scored([0.0, 0.5, 1.0, 2.0], 3, np.random.default_rng(1))
    table = np.array([[*scores.values()] for scores in settings])
    residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    deviation = math.sqrt((residuals**2).sum() / 6)
    for place, difference in compare(settings, 0).items():
        value = (table[place] - table[0]).mean()
        q = abs(value) / (deviation / math.sqrt(3))
        law: Any = stats.studentized_range
        assert difference.value == pytest.approx(value)
        assert difference.p == pytest.approx(law.sf(q, 4, 6), rel=1e-6)
        half = law.ppf(0.95, 4, 6) * deviation / math.sqrt(3)
        assert difference.high - difference.value == pytest.approx(half)


def simulated(count, **options):
    """Share of sweeps of equal settings with a winner, and how many intervals contradict p."""
    random = np.random.default_rng(0)
    winners = 0
    contradictions = 0
    for _ in range(count):
        settings = scored([0.0] * 5, 5, random, **options)
        means = [np.mean([*scores.values()]) for scores in settings]
        differences = compare(settings, int(np.argmin(means))).values()
        winners += all(difference.seen for difference in differences)
        for difference in differences:
            within = difference.low <= 0 <= difference.high
            contradictions += within == (difference.p < 0.05)
    return winners / count, contradictions


@pytest.mark.parametrize("noise", [1.0, [1, 1, 1, 1, 5]])
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_equal_settings_have_a_winner_in_at_most_a_twentieth(count, noise):
    share, contradictions = simulated(count, noise=noise)
    assert share <= 0.05
    assert contradictions == 0


def test_a_noisy_setting_does_not_hide_differences_of_others():
    quiet = scored([0.0, 1.0], 4, np.random.default_rng(3), noise=0.05)
    loud = scored([3.0, 4.0, 5.0], 4, np.random.default_rng(3), noise=[0.05, 0.05, 20.0])
    assert compare([*quiet, *loud], 0)[1].seen


def test_the_seeds_that_are_needed_are_the_fewest_with_a_power_of_four_in_five():
    settings = scored([0.0, 2.0], 4, np.random.default_rng(0))
    difference = compare(settings, 0)[1]
    assert not difference.seen
    pairs = np.subtract(*(list(setting.values()) for setting in settings[::-1]))

    def power(shift, seeds):
        size = abs(shift) / pairs.std(ddof=1) * math.sqrt(seeds)
        return float(stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, size))

    needed = difference.needed
    assert power(pairs.mean(), needed) >= 0.8 > power(pairs.mean(), needed - 1)


SCORES = {"0": 1.0, "1": 2.0, "2": 4.0}
HIGHER = {"0": 2.0, "1": 3.5, "2": 4.5}


@pytest.mark.parametrize("lost", [SCORES | {"3": NAN}, {"0": math.inf}, {}])
def test_a_setting_with_a_lost_run_is_not_compared(lost):
    assert compare([SCORES, lost], 0) == {}
    assert compare([lost, SCORES], 0) == {}


def test_one_common_seed_gives_no_interval():
    assert compare([{"0": 1.0}, {"0": 2.0}], 0) == {1: Difference(1.0, 1)}


def test_seeds_that_only_one_setting_has_do_not_count():
    common = compare([SCORES, HIGHER], 0)[1]
    more = compare([SCORES | {"3": 9.0}, HIGHER | {"4": -9.0}], 0)[1]
    assert more.value == common.value
    assert (more.p, more.low) == pytest.approx((common.p, common.low))


def test_equal_scores_are_no_question_of_seeds():
    same = compare([SCORES, dict(SCORES)], 0)[1]
    assert (same.p, same.seen, same.same, same.needed) == (1, False, True, None)


def test_a_difference_that_is_the_same_for_all_seeds_is_certain():
    higher = {seed: score + 1 for seed, score in SCORES.items()}
    shifted = compare([SCORES, higher], 0)[1]
    assert (shifted.low, shifted.high, shifted.p, shifted.seen) == (1.0, 1.0, 0.0, True)
