"""What a sweep prints: the answer of its page and a table of settings, and no luckiest seed."""

from dataclasses import replace

import pytest

from runner.report import read, write
from runner.report.findings import find
from runner.run_folder.status import Entry, SweepRecord
from runner.sweep import live
from tests.report.examples import NORM, sweep


@pytest.fixture
def folder(tmp_path):
    return sweep(tmp_path / "s", NORM, seeds=(0, 1, 2), steps=60)


def test_a_sweep_ends_with_the_title_of_its_page(folder):
    title = live.answer(find(read(folder))).splitlines()[0]
    assert f'<h1 id="verdict">{title}</h1>' in write(folder).read_text()


def test_a_sweep_ends_with_a_row_for_each_setting(folder):
    findings = find(read(folder))
    _, _, *table = live.answer(findings).splitlines()
    assert [line.split()[0] for line in table] == [s.label for s in findings.listed]
    for line, setting in zip(table, findings.listed, strict=True):
        mean, deviation = findings.scores.mean(setting)
        assert float(line.split()[1]) == round(mean, 4)
        assert f"± {deviation:.2g}"[:7] in line


def test_no_run_is_called_the_best_while_seeds_are_compared(tmp_path):
    folder = sweep(tmp_path / "s", NORM, seeds=(0, 1), steps=60)
    record = SweepRecord.read(folder)
    begun = Entry(8, "8", [], [], "x", state="running")
    assert "best so far" in live.news(replace(record, keys=["clip.threshold"]), begun)
    assert "best so far" not in live.news(replace(record, keys=["clip.threshold", "seed"]), begun)
