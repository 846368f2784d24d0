"""Sweeps in which seeds are missing, runs are lost or have not begun, or nothing was recorded."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from runner.report import figures, read
from runner.report.advice import advice
from runner.report.export import as_latex
from runner.report.findings import Findings, find
from runner.report.groups import named
from runner.report.page import html
from runner.report.table import table
from runner.report.verdict import remarks, verdict
from tests.report.examples import REQUEST, config, rows, write_run

Result = tuple[int, float]
"""Seed and evaluation loss of a run; NaN for one that diverged."""


def made(
    folder: Path, results: dict[float, list[Result]], state: str = "finished", **changes: Any
) -> Findings:
    """A sweep of thresholds of ``clip=norm``."""
    number = 0
    for threshold, of_seeds in results.items():
        for seed, loss in of_seeds:
            lines = rows(
                "norm", threshold, 40, evaluations=0, diverges_at=20 if loss != loss else None
            )
            lines[-1]["eval/loss"] = 0.01 if loss != loss else loss
            of = config(clip__threshold=threshold, seed=seed, **changes)
            words = ("clip=norm", f"clip.threshold={threshold}", f"seed={seed}")
            write_run(folder / str(number), lines, of, overrides=words, state=state)
            number += 1
    return find(read(folder))


def record(folder: Path, words: list[str], planned: list[list[str]]) -> None:
    """Write ``sweep.json`` with runs that never started, which come after those in the folder."""
    first = sum(each.is_dir() for each in folder.iterdir())
    runs = [
        {"number": first + i, "folder": str(first + i), "overrides": word[-1:], "words": word}
        | {"config_hash": "0123456789abcdef", "state": "waiting"}
        for i, word in enumerate(planned)
    ]
    about = {"name": "odd", "words": words, **REQUEST, "total": first + len(runs), "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(about | {"state": "interrupted"}))


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_a_run_that_is_lost_from_its_first_row_has_its_page(tmp_path: Path, value: float) -> None:
    lines = rows("none", None, 30, evaluations=0)
    for row in lines:
        row |= {"train/loss": math.nan, "grad/norm": value, "grad/norm_clipped": value}
    of = config(clip__mode="none", clip__threshold=None)
    folder = write_run(tmp_path / "run", lines, of, state="failed", error="NonFiniteGradient: lost")
    assert "NonFiniteGradient: lost" in html(read(folder))
    assert figures(folder)


def test_a_run_that_never_began_is_of_the_setting_that_was_asked_for(tmp_path: Path) -> None:
    made(tmp_path, {1.0: [(0, 0.3)]})
    words = ["model=gpt", "data=text", "clip=norm", "clip.threshold=1.0"]
    more = [["clip=norm", "clip.threshold=1.0", f"seed={seed}"] for seed in (1, 2)]
    record(tmp_path, ["-m", "clip=norm"], [*more, [*words, "seed=0"]])
    found = find(read(tmp_path))
    assert [len(group.runs) for group in found.groups] == [3, 1]
    assert found.groups[0].label.startswith("norm 1")
    last = found.sweep.runs[-1]
    assert found.sweep.command_of(last).endswith(" ".join([*words, "seed=0"]))


def test_lost_seeds_are_no_result_of_their_settings(tmp_path: Path) -> None:
    found = made(tmp_path, {1.0: [(0, 0.3), (1, math.nan)], 2.0: [(0, 0.4), (1, math.nan)]})
    assert verdict(found).startswith("No answer yet: no setting has a finite mean eval/loss")
    mean_rows = re.findall(r'<tr class="mean".*?</tr>', str(table(found)))
    assert len(mean_rows) == 2
    place = re.findall(r'<th [^>]*data-key="([^"]*)"', str(table(found))).index("best eval/loss")
    for row in mean_rows:
        assert re.findall(r'data-value="([^"]*)"', row)[place] == "nan"


def test_a_seed_that_ran_twice_counts_once(tmp_path: Path) -> None:
    found = made(tmp_path, {1.0: [(0, 1.0), (0, 1.0), (1, 2.0)], 2.0: [(0, 1.2), (1, 1.7)]})
    assert [found.mean(group)[0] for group in found.groups] == pytest.approx([1.5, 1.45])
    assert found.best is found.groups[1]
    assert "over 2 seeds" in verdict(found)


def test_the_share_clipped_is_that_of_the_runs_that_are_compared(tmp_path: Path) -> None:
    found = made(tmp_path, {1.0: [(0, 0.3)]})
    share = found.ratio(found.groups[0])
    write_run(tmp_path / "1", rows("norm", 1e-9, 5), config(seed=1), state="killed")
    found = find(read(tmp_path))
    assert found.ratio(found.groups[0]) == share


def test_one_shared_seed_is_compared_alone_and_the_sentence_says_on_which(tmp_path: Path) -> None:
    found = made(tmp_path / "a", {1.0: [(0, 1.9), (1, 1.0), (2, 1.1)], 2.0: [(0, 2.0)]})
    one = found.comparisons[1]
    assert (one.paired, one.seeds) == (True, 1)
    assert one.value == pytest.approx(0.1)
    lacking = {1.0: [(0, 0.30), (1, 0.31), (2, 0.20)], 2.0: [(0, 0.4), (1, 0.42)]}
    assert "on the 2 seeds that both have)" in verdict(made(tmp_path / "b", lacking))


def test_the_command_for_more_seeds_keeps_all_seeds_of_the_sweep(tmp_path: Path) -> None:
    made(tmp_path, {1.0: [(0, 0.3)], 2.0: [(0, 0.4)]})
    waiting = [
        ["clip=norm", f"clip.threshold={t}", f"seed={s}"] for t in (1.0, 2.0) for s in (7, 8)
    ]
    record(tmp_path, ["-m", "clip=norm", "clip.threshold=1.0,2.0", "seed=0,7,8"], waiting)
    assert any("seed=0,1,2,7,8" in note for note in remarks(find(read(tmp_path))))
    record(tmp_path, ["-m", "hydra/sweeper=optuna", "clip.threshold=1.0,2.0"], [])
    assert not any("seed=" in note for note in remarks(find(read(tmp_path))))


def test_no_setting_wins_while_all_runs_go_on(tmp_path: Path) -> None:
    clear = {1.0: [(s, 0.1 + s / 1e4) for s in range(3)], 2.0: [(s, 0.5) for s in range(3)]}
    assert made(tmp_path / "ended", clear).winner is not None
    assert made(tmp_path / "going", clear, state="running").winner is None


def test_values_to_copy_have_a_plain_minus_sign(tmp_path: Path) -> None:
    for number, (rate, loss) in enumerate([(1e-6, 0.9), (2e-6, 0.5), (4e-6, 0.2)]):
        lines = rows("norm", 1.0, 60, evaluations=0)
        lines[-1]["eval/loss"] = loss
        of = config(optimizer__lr=rate)
        write_run(tmp_path / str(number), lines, of, overrides=(f"optimizer.lr={rate}",))
    found = find(read(tmp_path))
    assert any("try 8e-6 and 1.6e-5" in one.text for one in advice(found))
    small = made(tmp_path / "small", {5e-5: [(0, 0.3)], 1.0: [(0, 0.4)]})
    assert named(small.groups, "norm 5e-5") is small.groups[0]


def test_accuracies_are_told_apart_by_their_errors(tmp_path: Path) -> None:
    for number, (rate, accuracy) in enumerate([(0.1, 0.93), (0.2, 0.97)]):
        lines = rows("norm", 1.0, 60, evaluations=0)
        lines[-1]["eval/accuracy"] = accuracy
        of = config(optimizer__lr=rate) | {"sweep": {"objective": "eval/accuracy"}}
        write_run(tmp_path / str(number), lines, of, overrides=(f"optimizer.lr={rate}",))
    assert any("is the highest tried" in one.text for one in advice(find(read(tmp_path))))


@pytest.mark.parametrize(("state", "lost"), [("finished", False), ("failed", True)])
def test_one_lost_last_batch_is_no_divergence_of_a_run_that_finished(
    tmp_path: Path, state: str, lost: bool
) -> None:
    lines = rows("norm", 1.0, 60)
    lines[-1]["train/loss"] = math.nan
    found = find(read(write_run(tmp_path / "run", lines, config(), state=state)))
    [measured] = found.measured.values()
    assert (measured.diverged_at is not None) is lost


def test_a_table_for_latex_may_begin_with_a_list_and_lack_a_metric(tmp_path: Path) -> None:
    for number, betas in enumerate(([0.9, 0.95], [0.9, 0.99])):
        of = config(optimizer__betas=betas)
        write_run(tmp_path / str(number), [], of, overrides=(f"optimizer.betas={betas}",))
    text = as_latex(find(read(tmp_path)))
    assert not re.search(r"^\[", text, re.MULTILINE)
    assert "best metric" in text
