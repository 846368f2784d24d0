"""``python -m runner bench parity``: which tools clip right, in which layout."""

import json
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from runner.bench import WITH
from runner.bench import cells as cells_module
from runner.bench.cells import MODES, Place, cell, cells
from runner.bench.clip_calls import OTHERS, TOOLS
from runner.bench.environments import measured as measured_rows
from runner.bench.layouts import LAYOUTS
from runner.bench.parity import markdown, page
from runner.check import reference
from tests.process import python
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("parity")  # the ranks run once

FEW = ("DDP", "experts of each rank", "sequence")


def of_a_call_that_hangs():
    """The row of a tool that leaves out a collective on one rank."""
    group = dist.new_group(timeout=timedelta(seconds=2))

    def clip(limit, groups):
        if dist.get_rank() != 1:
            dist.all_reduce(torch.zeros(1), group=group)

    cells_module.clips_of = lambda tool, model: {"norm": clip}
    return cell(Place("DDP", "norm", "torch"))


def measured():
    """A few cells, those of ours by a reference that is wrong by 1 %, and a call that hangs."""
    right = cells(FEW, ["torch", "clip-runner"], ["norm"])
    root = reference.root
    cells_module.reference.root = lambda total, p: 1.01 * root(total, p)
    try:
        wrong = cells(FEW, ["clip-runner"], ["norm"])
    finally:
        cells_module.reference.root = root
    return right, wrong, of_a_call_that_hangs()


@pytest.fixture(scope="module")
def few_cells():
    """Rows by the right reference, by the wrong one, and of a call that hangs, of rank 0."""
    return run_ranks(measured, 4)[0]


def row_of(rows, layout, tool):
    (row,) = [row for row in rows if (row["layout"], row["tool"]) == (layout, tool)]
    return row


def test_torch_is_right_under_ddp(few_cells):
    assert row_of(few_cells[0], "DDP", "torch")["verdict"] == "right"


def test_the_norm_that_torch_takes_of_experts_is_off_by_both_numbers(few_cells):
    rows = few_cells[0]
    experts = row_of(rows, "experts of each rank", "torch")
    assert experts["verdict"] == "off"
    assert experts["measured"] < 0.99 * experts["expected"]
    numbers = f"norm {experts['measured']:.4g} for {experts['expected']:.4g}"
    assert numbers in markdown(rows, "2026-11-29T00:00:00")


@pytest.mark.parametrize("layout", FEW)
def test_ours_is_right_in_a_layout(layout, few_cells):
    assert row_of(few_cells[0], layout, "clip-runner")["verdict"] == "right"


def test_a_reference_that_is_wrong_by_1_percent_is_seen(few_cells):
    assert {row["verdict"] for row in few_cells[1]} == {"off"}


@pytest.fixture(scope="module")
def whole_table(tmp_path_factory):
    """All rows, and the folder of the tables."""
    folder = tmp_path_factory.mktemp("parity") / "out"
    python("-m", "runner", "bench", "parity", "--output", str(folder))
    rows = json.loads((folder / "bench.json").read_text())["tables"]["parity"]["rows"]
    return rows, folder


def test_a_call_that_hangs_is_named_with_the_ranks_that_wait(few_cells):
    row = few_cells[2]
    assert row["verdict"] == "hangs"
    assert row["detail"] == "ranks 0, 2, 3 wait in a collective, rank 1 has left"
    others = [{**row, "tool": tool, "verdict": "not run here"} for tool in OTHERS]
    assert "**hangs** (ranks 0, 2, 3 wait" in markdown([row, *others], "2026-11-29T00:00:00")
    assert "<td class=raises>hangs<br>" in page([row, *others], "2026-11-29T00:00:00")
    assert tuple(OTHERS) == WITH


@pytest.mark.slow
def test_ours_is_right_in_every_cell(whole_table):
    ours = [row for row in whole_table[0] if row["tool"] == "clip-runner"]
    assert [row["text"] for row in ours if row["verdict"] != "right"] == []


@pytest.mark.slow
def test_every_cell_is_measured(whole_table):
    rows, folder = whole_table
    assert len(rows) == len(LAYOUTS) * len(TOOLS) * len(MODES)
    for row in rows:
        assert row["verdict"] in ("right", "off", "raises", "not applicable")
        assert row["verdict"] != "off" or row["measured"] != row["expected"], row["text"]
    table = (folder / "parity.md").read_text()
    assert all(f"| {layout} |" in table for layout in LAYOUTS)
    assert (folder / "parity.html").read_text().count("<td") == table.count("right") + sum(
        row["verdict"] in ("off", "raises") for row in rows
    )


@pytest.mark.slow
def test_cells_after_ranks_that_died_are_measured(tmp_path):
    missing = Place("DDP", "norm", "no such tool")
    rows = list(measured_rows([missing, Place("DDP", "norm", "torch")], sys.executable, tmp_path))
    assert [row["verdict"] for row in rows] == ["raises", "right"]
