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

pytestmark = pytest.mark.xdist_group("parity")  # the ranks run once

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


@pytest.fixture(scope="module")
def few_cells():
    """Rows by the right reference and by the wrong one, of rank 0."""
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
    """All rows, and the table as text."""
    folder = tmp_path_factory.mktemp("parity") / "out"
    python("-m", "runner", "bench", "parity", "--output", str(folder))
    rows = json.loads((folder / "bench.json").read_text())["tables"]["parity"]["rows"]
    return rows, (folder / "parity.md").read_text()


@pytest.mark.slow
def test_ours_is_right_in_every_cell(whole_table):
    ours = [row for row in whole_table[0] if row["tool"] == "clip-runner"]
    assert [row["text"] for row in ours if row["verdict"] != "right"] == []


@pytest.mark.slow
def test_every_cell_is_measured(whole_table):
    rows, text = whole_table
    assert len(rows) == len(LAYOUTS) * len(TOOLS) * len(MODES)
    for row in rows:
        assert row["verdict"] in ("right", "off", "raises", "not applicable")
        assert row["verdict"] != "off" or row["measured"] != row["expected"], row["text"]
    assert all(f"| {layout} |" in text for layout in LAYOUTS)
