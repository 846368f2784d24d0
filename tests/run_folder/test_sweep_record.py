import json
import math
from contextlib import suppress

import pytest

from runner.run_folder.sweep_record import Entry, SweepRecord, changed


def record(**changes):
    entries = [Entry(0, "0", ["seed=1"], ["seed=1"], "aa"), Entry(1, "1", ["seed=2"], [], "bb")]
    content = {"name": "mine", "words": ["-m", "seed=1,2"], "request": "cc", "keys": ["seed"]}
    content |= {"objective": "eval/loss", "maximizes": False, "max_failures": None, "total": 2}
    return SweepRecord(**{**content, "entries": entries, **changes})


def test_a_record_reads_back(tmp_path):
    made = record()
    made.entries[0].objective = 0.25
    made.write(tmp_path)
    assert SweepRecord.read(tmp_path) == made
    assert [run["number"] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]] == [
        0,
        1,
    ]


def test_numbers_that_are_not_finite_are_strict_json(tmp_path):
    made = record()
    made.entries[0].objective = math.nan
    made.entries[1].objective = math.inf
    made.write(tmp_path)
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)
    read = SweepRecord.read(tmp_path)
    assert math.isnan(read.entries[0].objective)
    assert read.entries[1].objective == math.inf


def test_a_change_is_written_whole(tmp_path):
    record().write(tmp_path)
    with changed(tmp_path) as held:
        held.of(1).state = "failed"
    assert SweepRecord.read(tmp_path).of(1).state == "failed"
    with suppress(KeyError), changed(tmp_path) as held:
        held.of(1).state = "finished"
        held.of(2)
    assert SweepRecord.read(tmp_path).of(1).state == "failed"


@pytest.mark.parametrize("text", ["", "[]", '{"runs": [{}]}', '{"name": "mine"}'])
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011
        SweepRecord.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"runs": [1]}, "runs.0"),
        ({"runs": None}, "runs"),
        ({"words": "seed=1"}, "words"),
        ({"total": None}, "total"),
        ({"number": None}, "runs.0.number"),
        ({"number": -1}, "runs.0.number"),
        ({"number": 1}, "two runs have one number"),
        ({"folder": 3}, "runs.0.folder"),
        ({"objective": "low"}, "runs.0.objective"),
        ({"colour": "red"}, "runs.0.colour"),
    ],
)
def test_a_damaged_record_names_what_is_wrong(tmp_path, change, place):
    record().write(tmp_path)
    file = tmp_path / "sweep.json"
    content = json.loads(file.read_text())
    if change.keys() <= {"runs", "words", "total"}:
        content |= change
    else:
        content["runs"][0] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=place) as error:
        SweepRecord.read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_name_that_reads_like_a_number_stays_a_name(tmp_path):
    record(name="NaN").write(tmp_path)
    assert SweepRecord.read(tmp_path).name == "NaN"
