"""The table of a sweep as CSV, JSON and LaTeX, read back by other programs."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from runner.cli.report import main
from runner.config.problem import RequestError
from tests.report.examples import HOSTILE, NORM, config, rows, sweep, troubled, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four thresholds and no clipping with three seeds, and all that is exported."""
    made = sweep(tmp_path_factory.mktemp("s") / "s", [*NORM, ("none", None)], (0, 1, 2), steps=60)
    assert main([str(made), "--csv", "--latex", "report.baseline=none", "--json"]) == 0
    return made


def summaries(folder: Path) -> list[dict[str, Any]]:
    files = [folder / str(number) / "summary.json" for number in range(15)]
    return [json.loads(file.read_text()) for file in files]


def test_csv_has_one_row_a_run_with_all_digits_and_only_what_differs(folder: Path) -> None:
    with (folder / "report.csv").open(newline="") as stream:
        read = list(csv.DictReader(stream))
    assert len(read) == 15
    for row, summary in zip(read, summaries(folder), strict=True):
        assert float(row["best/eval/loss"]) == summary["best"]["eval/loss"]
        assert float(row["final/eval/loss"]) == summary["final"]["eval/loss"]
        assert float(row["clip/ratio_total"]) == summary["clip/ratio_total"]
        assert float(row["grad/norm/p90"]) == summary["grad/norm"]["p90"]
    keys = {key for key in read[0] if "." in key} | {"seed"} & set(read[0])
    assert keys == {"clip.mode", "clip.threshold", "seed"}
    assert [row["clip.threshold"] for row in read[::3]] == ["0.1", "0.25", "1.0", "2.0", ""]
    assert [row["seed"] for row in read[:3]] == ["0", "1", "2"]


def test_json_holds_the_differences_that_scipy_finds(folder: Path) -> None:
    read = json.loads((folder / "report.json").read_text())
    assert (read["compared_with"], read["metric"]) == ("none", "eval/loss")
    assert [one["setting"] for one in read["runs"][::3]] == [
        one["setting"] for one in read["settings"]
    ]
    scores = [one["best"]["eval/loss"] for one in summaries(folder)]
    for place, one in enumerate(read["settings"][:4]):
        pair: Any = stats.ttest_rel(scores[3 * place : 3 * place + 3], scores[12:])
        low, high = pair.confidence_interval(0.95)
        found = one["difference"]
        assert (found["low"], found["high"], found["p"]) == pytest.approx((low, high, pair.pvalue))
        assert found["corrected"] >= found["p"]
    assert read["settings"][4]["difference"] is None


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))]


def test_latex_has_one_row_a_setting(folder: Path) -> None:
    lines = (folder / "report.tex").read_text().splitlines()
    table = [cells(line) for line in lines if line.endswith(r"\\")]
    names = ["clip.mode", "clip.threshold", "seeds", "best eval/loss", r"$\Delta$ to none", "p"]
    assert table[0] == names
    assert [row[1] for row in table[1:]] == ["0.1", "0.25", "1.0", "2.0", "none"]
    assert all(len(row) == len(names) for row in table)
    assert r"\begin{tabular}{llrrrr}" in lines
    read = json.loads((folder / "report.json").read_text())
    for row, one in zip(table[1:], read["settings"], strict=True):
        mean, deviation = re.fullmatch(r"([\d.]+) \$\\pm\$ ([\d.]+)", row[3]).groups()  # type: ignore[union-attr]
        assert float(mean) == pytest.approx(one["mean"], rel=1e-3)
        assert float(deviation) == pytest.approx(one["sd"], rel=0.05)


@pytest.mark.parametrize("made", ["plain", "hostile"])
def test_latex_compiles(folder: Path, tmp_path: Path, made: str) -> None:
    if made == "hostile":
        folder = troubled(tmp_path / "a_b % & # $ {x} ~ ^ \\")
        assert main([str(folder), "--latex"]) == 0
    text = (folder / "report.tex").read_text()
    body = text.partition("\n")[2]
    # What LaTeX takes for a command or a comment stands behind a backslash.
    for sign in "#%":
        assert not re.search(rf"(?<!\\){sign}", body)
    assert body.count("{") == body.count("}")
    program, finds = shutil.which("pdflatex"), shutil.which("kpsewhich")
    if (
        None in (program, finds)
        or not subprocess.run([finds, "booktabs.sty"], capture_output=True).stdout
    ):
        return
    whole = (
        rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}\end{{document}}"
    )
    (tmp_path / "t.tex").write_text(whole)
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)


def test_text_of_a_configuration_stays_text(tmp_path: Path) -> None:
    folder = troubled(tmp_path / "s")
    assert main([str(folder), "--csv", "--json"]) == 0
    with (folder / "report.csv").open(newline="") as stream:
        read = {row["run"]: row for row in csv.DictReader(stream)}
    assert read["6"]["model.name"] == HOSTILE
    assert {run: row["state"] for run, row in read.items()} == {
        **{str(number): "finished" for number in range(7)},
        "7": "failed",
        "8": "killed",
        "9": "not started",
    }
    whole = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert len(whole["runs"]) == 10


def test_one_run_can_be_exported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(steps=30), config())
    assert main([str(folder), "--csv", "--latex", "--json"]) == 0
    with (folder / "report.csv").open(newline="") as stream:
        [row] = csv.DictReader(stream)
    assert float(row["clip.threshold"]) == 1.0
    assert json.loads((folder / "report.json").read_text())["winner"] is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("report.baseline=norm 0.26", "did you mean norm 0.25?"),
        ("report.baseline=15", "settings: norm 0.1, norm 0.25, norm 1, norm 2, none"),
        ("report.baselin=none", "did you mean report.baseline?"),
        ("report.baseline=", "the page takes report.baseline=NAME alone"),
        ("clip=norm", "the page takes report.baseline=NAME alone"),
    ],
)
def test_a_wrong_baseline_is_refused_before_anything_is_written(
    tmp_path: Path, word: str, message: str
) -> None:
    folder = sweep(tmp_path / "s", [*NORM, ("none", None)], seeds=(0, 1, 2), steps=10)
    with pytest.raises(RequestError) as error:
        main([str(folder), "--csv", word])
    assert message in str(error.value)
    assert not list(folder.glob("report.*"))
