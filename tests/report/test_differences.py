"""Differences between settings on the page: the table, the verdict, and the seeds still needed."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from runner.compose.request import request
from runner.report import read, write
from runner.report.compared import baselines
from runner.report.findings import Findings, find
from runner.report.table import table
from runner.report.verdict import remarks, verdict
from runner.run_folder.sweep_record import SweepRecord
from tests.report.examples import NORM, config, rows, sweep, write_run


def made(folder: Path, losses: dict[float | None, list[float]], **changes: Any) -> Findings:
    """A sweep of thresholds in which each seed reached one loss; None is a run that failed."""
    number = 0
    for threshold, of_seeds in losses.items():
        mode = "norm" if threshold else "none"
        for seed, loss in enumerate(of_seeds):
            lines = rows(mode, threshold, 20, evaluations=0)
            lines[-1]["eval/loss"] = loss
            of = config(clip__mode=mode, clip__threshold=threshold, seed=seed, **changes)
            write_run(folder / str(number), lines, of)
            number += 1
    return find(read(folder))


def cells(page: str, key: str) -> dict[str, tuple[float, str]]:
    """Value and text of one column of the table, by the setting's first row."""
    place = re.findall(r'<th [^>]*data-key="([^"]*)"', page).index(key)
    found = {}
    for index, row in re.findall(r'<tbody id="setting-(\d+)"[^>]*><tr[^>]*>(.*?)</tr>', page):
        value, text = re.findall(r'<t[hd][^>]*data-value="([^"]*)"[^>]*>(.*?)</t[hd]>', row)[place]
        found[index] = (float(value) if value else float("nan"), unescape(text))
    return found


CLEAR = {0.5: [0.100, 0.200, 0.300], 1.0: [0.151, 0.250, 0.349], None: [0.199, 0.301, 0.400]}
OPEN = {0.5: [0.10, 0.21, 0.28], 1.0: [0.12, 0.20, 0.30], None: [0.50, 0.62, 0.69]}


def test_the_winner_is_named_where_all_intervals_say_so(tmp_path: Path) -> None:
    found = made(tmp_path, CLEAR)
    assert found.winner is not None
    sentence = verdict(found)
    assert sentence.startswith("clip=norm 0.5 wins with the lowest eval/loss: 0.2 ± 0.1 over 3")
    assert "(difference +0.1, 95 % interval +0.09" in sentence
    assert "No winner" not in sentence
    assert not any("more seed" in note for note in remarks(found))


def test_no_winner_is_named_where_one_interval_does_not_say_so(tmp_path: Path) -> None:
    found = made(tmp_path, OPEN)
    assert found.winner is None
    sentence = verdict(found)
    assert "gave the lowest eval/loss" in sentence
    assert "No winner: no difference to norm 1 could be seen. These 3 seeds show a true" in sentence


def test_missing_seeds_make_no_winner_of_what_is_worse_seed_by_seed(tmp_path: Path) -> None:
    """The first setting lacks the seed on which both are bad."""
    found = made(tmp_path, {0.5: [0.2, 0.3, 0.4], 1.0: [0.1, 0.201, 0.299, 9.0]})
    assert found.best is not None
    assert found.best.label == "norm 0.5"
    assert found.rivals[1].seen
    assert found.rivals[1].value == pytest.approx(-0.1)
    assert found.winner is None


def test_settings_with_the_same_runs_leave_no_question_to_seeds(tmp_path: Path) -> None:
    found = made(tmp_path, {0.5: [0.2, 0.3], 1.0: [0.2, 0.3]})
    assert verdict(found).startswith(
        "clip=norm 0.5 and clip=norm 1 share the lowest eval/loss: 0.25"
    )
    assert "No winner" not in verdict(found)
    assert not any("seed" in note for note in remarks(found))


def test_a_higher_objective_can_win(tmp_path: Path) -> None:
    sweep = {"objective": "eval/loss", "direction": "maximize"}
    found = made(tmp_path, CLEAR, sweep=sweep)
    assert found.winner is not None
    assert found.winner.label == "none"


def test_one_setting_with_one_seed_is_no_loser(tmp_path: Path) -> None:
    found = made(tmp_path, CLEAR | {None: [0.5]})
    assert found.winner is None
    assert any(note.startswith("none has a result of one seed") for note in remarks(found))


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_setting_that_diverged_keeps_nobody_from_winning(tmp_path: Path, lost: float) -> None:
    found = made(tmp_path, CLEAR | {8.0: [0.1, lost, 0.1]})
    assert found.winner is not None
    assert found.winner.label == "norm 0.5"


def test_the_table_shows_the_differences_to_the_best(tmp_path: Path) -> None:
    found = made(tmp_path, OPEN)
    page = write(tmp_path).read_text()
    shown = cells(page, "difference")
    assert shown["1"][0] == pytest.approx(0.01)
    assert re.fullmatch(r"\+0\.01 \[−0\.\d+, \+0\.\d+\]", shown["1"][1])
    assert shown["0"][1] == "–"
    assert "Δ to norm 0.5" in unescape(page)
    assert cells(page, "p")["1"][0] == found.comparisons[1].corrected


def test_a_baseline_takes_the_place_of_the_best(tmp_path: Path) -> None:
    made(tmp_path, OPEN)
    by_name = write(tmp_path, baseline="none").read_text()
    assert write(tmp_path, baseline="7").read_text() == by_name  # a run of that setting
    assert "Δ to none" in unescape(by_name)
    assert cells(by_name, "difference")["0"][0] == pytest.approx(-1.22 / 3)
    assert "with the baseline, none (difference −0.407" in unescape(by_name)


def test_the_baseline_may_come_from_the_configuration(tmp_path: Path) -> None:
    found = made(tmp_path / "s", OPEN, report={"baseline": "none"})
    assert found.baseline is not None
    assert found.baseline.label == "none"
    assert len(found.groups) == 3
    alone = find(read(tmp_path / "s" / "0"))  # the page of one run has nothing to compare
    assert (alone.baseline, alone.unknown) == (None, None)
    wrong = made(tmp_path / "wrong", OPEN, report={"baseline": "norm 7"})
    assert wrong.baseline is None
    [note] = [note for note in remarks(wrong) if note.startswith("report.baseline=")]
    assert note.endswith("norm 7 names no setting of this page, which has norm 0.5, norm 1, none.")


def test_only_a_setting_that_can_be_compared_has_a_button(tmp_path: Path) -> None:
    """It is pressed for the baseline of the configuration; one that diverged has none."""
    lost = {8.0: [0.1, float("nan"), 0.1]}
    made(tmp_path / "few", OPEN | lost, report={"baseline": "none"})
    page = write(tmp_path / "few").read_text()
    buttons = r'aria-label="Compare with ([^"]*)" aria-pressed="(true|false)"'
    pressed = {"norm 0.5": "false", "norm 1": "false", "none": "true"}
    assert dict(re.findall(buttons, page)) == pressed
    many = made(tmp_path / "many", {0.5 + step: [0.1 + step] for step in range(33)})
    text = table(many)
    assert "aria-pressed" not in text
    assert "report.baseline=NAME" in text
    assert baselines(many) == {}


def test_every_link_to_what_a_sentence_rests_on_leads_to_a_row(tmp_path: Path) -> None:
    assert made(tmp_path, CLEAR).winner is not None
    page = write(tmp_path).read_text()
    assert "The best threshold, 0.5, is the lowest tried" in page
    links = set(re.findall(r'href="#(setting-\d+)"', page))
    assert links
    assert links <= set(re.findall(r'id="([^"]+)"', page))


def test_the_command_for_more_seeds_keeps_the_runs_that_are_there(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "sweep", NORM[1:3], seeds=(0, 1), steps=40)
    found = find(read(folder))
    [note] = [note for note in remarks(found) if "would decide" in note or "needed" in note]
    command = unescape(re.findall("<code>(.*)</code>", note)[0]).split()
    assert command[:4] == ["python", "-m", "runner", "-m"]
    asked = request(command[4:], multirun=True, writes=False)
    assert asked.sweep is not None
    assert asked.sweep.name == SweepRecord.read(folder).name
    seeds = sorted({job.config.seed for job in asked.jobs})
    needed = min(one.needed or 99 for one in found.rivals.values())
    assert seeds == list(range(needed))
