import json
import math
from contextlib import suppress

import pytest

from runner.run_folder.status import Entry, SweepRecord, changed


@pytest.fixture
def record(tmp_path):
    entries = [Entry(0, "0", ["seed=1"], ["seed=1"], "aa"), Entry(1, "1", ["seed=2"], [], "bb")]
    content = {"name": "NaN", "words": ["-m", "seed=1,2"], "request": "cc", "keys": ["seed"]}
    content |= {"objective": "eval/loss", "maximizes": False, "max_failures": None, "total": 2}
    made = SweepRecord(**content, entries=entries)
    made.entries[0].objective = math.inf
    made.write(tmp_path)
    return made


def test_a_record_reads_back_and_is_changed_as_a_whole(record, tmp_path):
    assert SweepRecord.read(tmp_path) == record
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)
    with changed(tmp_path) as held:
        held.of(1).state = "failed"
    with suppress(KeyError), changed(tmp_path) as held:
        held.of(1).state = "finished"
        held.of(2)
    assert SweepRecord.read(tmp_path).of(1).state == "failed"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"runs": [', '"runs": [1, ', "runs.0"),
        ('"number": 0', '"number": -1', "runs.0.number"),
        ('"folder": "0"', '"folder": "../0"', "runs.0.folder"),
        ('"objective": "Infinity"', '"objective": "low"', "runs.0.objective"),
        ('"number"', '"colour"', "runs.0.number"),
        ("{", "", "sweep.json"),
    ],
)
def test_a_damaged_record_names_what_is_wrong(record, tmp_path, old, new, place):
    file = tmp_path / "sweep.json"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=place):
        SweepRecord.read(tmp_path)
