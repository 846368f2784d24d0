from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.report import read
from runner.report.advice import THRESHOLD, edge
from runner.report.findings import Findings, find
from runner.report.verdict import remarks, verdict
from tests.report.examples import NORM, config, rows, sweep, troubled, write_run


def made(folder: Path, *runs: tuple[str, float | None, float], **options: Any) -> Findings:
    """A sweep in which each (mode, threshold, best evaluation loss) is one finished run."""
    for number, (mode, threshold, loss) in enumerate(runs):
        lines = rows(mode, threshold, 20, evaluations=0)
        lines[-1]["eval/loss"] = loss
        of = config(clip__mode=mode, clip__threshold=threshold, seed=options.get("seed", number))
        write_run(folder / str(number), lines, of)
    return find(read(folder))


def test_the_best_is_named_with_its_score_and_what_it_is_better_than(tmp_path: Path) -> None:
    found = made(tmp_path, ("norm", 0.1, 0.5), ("norm", 1.0, 0.3), ("none", None, 0.4))
    sentence = verdict(found)
    assert sentence.startswith("clip=norm 1 gave the lowest eval/loss: 0.3, against 0.4 without")


def test_no_clipping_can_be_best(tmp_path: Path) -> None:
    found = made(tmp_path, ("norm", 0.1, 0.5), ("none", None, 0.4))
    assert verdict(found).startswith("No clipping gave the lowest eval/loss: 0.4, against 0.5 with")
    assert edge(found, THRESHOLD) is None


def test_seeds_are_averaged_and_a_small_lead_is_called_one(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        *(("norm", 1.0, loss) for loss in (0.30, 0.32)),
        *(("norm", 2.0, loss) for loss in (0.31, 0.33)),
    )
    sentence = verdict(found)
    assert "0.31 ± 0.014 over 2 seeds" in sentence
    assert "No winner: no difference to the others could be seen." in sentence
    assert "These 2 seeds show a true difference of 0.08 four times in five" in sentence
    assert not any("one seed" in note for note in remarks(found))


def test_one_seed_a_setting_is_remarked(tmp_path: Path) -> None:
    found = made(tmp_path, ("norm", 0.1, 0.5), ("norm", 1.0, 0.3), seed=0)
    assert any("one seed" in note for note in remarks(found))


def test_a_diverged_setting_is_never_best(tmp_path: Path) -> None:
    found = made(tmp_path, ("norm", 1.0, 0.3), ("norm", 2.0, 0.4))
    lost = rows("norm", 4.0, 60, diverges_at=30, evaluations=0)
    lost[10]["eval/loss"] = 0.01
    write_run(tmp_path / "2", lost, config(clip__threshold=4.0))
    found = find(read(tmp_path))
    assert verdict(found).startswith("clip=norm 1 ")
    assert any("diverged in 1 of 3" in note for note in remarks(found))


def test_a_run_cut_short_is_not_judged_beside_whole_ones(tmp_path: Path) -> None:
    made(tmp_path, ("norm", 1.0, 0.3), ("norm", 2.0, 0.4))
    ahead = rows("norm", 4.0, 10, evaluations=0)
    ahead[-1]["eval/loss"] = 0.01
    write_run(tmp_path / "2", ahead, config(clip__threshold=4.0), state="running")
    assert verdict(find(read(tmp_path))).startswith("clip=norm 1 ")


@pytest.mark.parametrize(
    ("scores", "warning"),
    [
        ((0.1, 0.2, 0.3), "is the lowest tried"),
        ((0.3, 0.2, 0.1), "is the highest tried"),
        ((0.3, 0.1, 0.2), None),
    ],
)
def test_a_best_at_the_edge_is_warned_of(
    tmp_path: Path, scores: tuple[float, ...], warning: str | None
) -> None:
    runs = [("norm", t, s) for t, s in zip((0.1, 1.0, 2.0), scores, strict=True)]
    sentence = edge(made(tmp_path, *runs), THRESHOLD)
    assert sentence is None if warning is None else warning in sentence.text


def test_beyond_the_highest_threshold_lies_no_clipping(tmp_path: Path) -> None:
    found = made(tmp_path, ("norm", 0.1, 0.3), ("norm", 1.0, 0.1), ("none", None, 0.2))
    assert edge(found, THRESHOLD) is None


def test_a_threshold_without_a_result_closes_no_range(tmp_path: Path) -> None:
    made(tmp_path, ("norm", 0.1, 0.3), ("norm", 1.0, 0.1))
    ended = rows("norm", 2.0, 5, evaluations=0)
    write_run(tmp_path / "2", ended, config(clip__threshold=2.0), state="interrupted")
    assert "is the highest with a result" in str(edge(find(read(tmp_path)), THRESHOLD))


def test_failures_are_named_with_their_cause(tmp_path: Path) -> None:
    notes = remarks(find(read(troubled(tmp_path / "s"))))
    assert any(note.startswith("Run 7 failed at step 120: RuntimeError") for note in notes)
    assert any(note.startswith("Run 8 was killed at step 77") for note in notes)
    assert any("1 not started" in note for note in notes)


def test_nothing_finite_is_no_answer(tmp_path: Path) -> None:
    for number in range(2):
        lost = rows(steps=30, diverges_at=10, seed=number)
        write_run(tmp_path / str(number), lost, config(clip__threshold=number + 1.0))
    assert verdict(find(read(tmp_path))).startswith("No answer yet: no setting has a finite mean")


def test_the_configured_objective_decides(tmp_path: Path) -> None:
    for number, (loss, accuracy) in enumerate([(0.1, 0.5), (0.2, 0.9)]):
        lines = rows(steps=10, evaluations=0)
        lines[-1] |= {"eval/loss": loss, "eval/accuracy": accuracy}
        of = config(clip__threshold=number + 1.0, sweep={"objective": "eval/accuracy"})
        write_run(tmp_path / str(number), lines, of)
    assert verdict(find(read(tmp_path))).startswith("clip=norm 2 gave the highest eval/accuracy")


def test_a_sweep_of_seeds_alone_gives_their_mean(tmp_path: Path) -> None:
    found = find(read(sweep(tmp_path / "s", NORM[:1], seeds=(0, 1, 2), steps=40)))
    assert verdict(found).startswith("One setting, 3 runs: ")
