"""``python -m runner bench parity``: which tools clip right, in which layout."""

import json

import pytest

from runner.bench import parity
from runner.bench.clip_calls import TOOLS
from runner.bench.layouts import LAYOUTS
from runner.bench.parity import MODES, cells, markdown
from runner.check import reference
from tests.process import python
from tests.ranks import run_ranks

FEW = ("DDP", "experts of each rank", "sequence")


def measured():
    """A few cells, and those of ours by a reference that is wrong by 1 %."""
    right = cells(FEW, ["torch", "clip-runner"], ["norm"])
    root = reference.root
    parity.reference.root = lambda total, p: 1.01 * root(total, p)
    try:
        return right, cells(FEW, ["clip-runner"], ["norm"])
    finally:
        parity.reference.root = root


def test_a_tool_is_right_or_off_and_a_broken_reference_is_seen():
    rows, by_a_wrong_reference = run_ranks(measured, 4)[0]
    verdicts = {(row["layout"], row["tool"]): row for row in rows}
    assert verdicts["DDP", "torch"]["verdict"] == "right"
    experts = verdicts["experts of each rank", "torch"]
    assert experts["verdict"] == "off"
    numbers = f"norm {experts['measured']:.4g} for {experts['expected']:.4g}"
    assert numbers in markdown(rows, "2026-11-29T00:00:00")
    assert experts["measured"] < 0.99 * experts["expected"]
    for layout in FEW:
        assert verdicts[layout, "clip-runner"]["verdict"] == "right", layout
    assert {row["verdict"] for row in by_a_wrong_reference} == {"off"}


@pytest.mark.slow
def test_ours_is_right_in_every_cell_and_every_cell_is_measured(tmp_path):
    folder = tmp_path / "out"
    python("-m", "runner", "bench", "parity", "--output", str(folder))
    rows = json.loads((folder / "bench.json").read_text())["tables"]["parity"]["rows"]
    assert len(rows) == len(LAYOUTS) * len(TOOLS) * len(MODES)
    ours = [row for row in rows if row["tool"] == "clip-runner"]
    assert [row["text"] for row in ours if row["verdict"] != "right"] == []
    for row in rows:
        assert row["verdict"] in ("right", "off", "raises", "not applicable")
        assert row["verdict"] != "off" or row["measured"] != row["expected"], row["text"]
    table = (folder / "parity.md").read_text()
    assert all(f"| {layout} |" in table for layout in LAYOUTS)
