"""A run whose files would crash or hang a reader does not take the page of the others.

Each page is written by a process of its own: a crash would end the process.
"""

import json
from pathlib import Path

import pytest

from tests.process import python
from tests.report.examples import sweep

DEEP = "[" * 100_000
ROW = {"train/step": 1, "train/loss": 10**400, "grad/norm": 1e-320, "clip/ratio": -(10**400)}

DAMAGE = {
    "json": {"status.json": '{"a":' * 100_000, "summary.json": DEEP, "metrics.jsonl": DEEP},
    "numbers": {
        "metrics.jsonl": json.dumps(ROW) + "\n" + json.dumps(ROW | {"train/step": 10**400}),
        "summary.json": json.dumps({"steps": 10**400, "best": {"eval/loss": 10**400}}),
        "status.json": json.dumps({"state": "finished", "step": 10**400, "pid": 10**400}),
        "config.yaml": "clip: {mode: norm, threshold: 1.0e-320}\nseed: " + "9" * 400,
    },
    "folders": dict.fromkeys(("config.yaml", "status.json", "summary.json", "metrics.jsonl")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_one_damaged_run_leaves_the_others_on_the_page(tmp_path: Path, name: str) -> None:
    folder = sweep(tmp_path / "mine", [("norm", 0.25), ("norm", 1.0), ("none", None)], steps=20)
    for file, text in DAMAGE[name].items():
        path = folder / "1" / file
        if text is None:
            path.unlink()
            path.mkdir()
        else:
            path.write_text(text)
    done = python("-m", "runner", "report", str(folder), timeout=120)
    assert done.stderr == ""
    page = (folder / "report.html").read_text(encoding="utf-8")
    for run in "012":
        assert f'data-run="{run}"' in page
    assert "unreadable" not in page
