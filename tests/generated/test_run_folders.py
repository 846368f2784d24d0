"""Whatever became of the files of a run: the page of its sweep is written, and shows the others."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runner.report import NoRunError, read, write
from runner.run_folder.earlier import earlier_record
from runner.run_folder.sweep_record import SweepRecord
from runner.sweep import live
from runner.sweep.resume import load_status
from tests.generated.damage import damage, damages, restored
from tests.generated.limits import examples
from tests.report.examples import LAYERS, sweep

SETTINGS = [("norm", 0.25), ("adaptive", 0.04), ("none", None)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep of three runs that finished."""
    folder = tmp_path_factory.mktemp("made") / "mine"
    sweep(folder, SETTINGS, steps=30, layers=LAYERS[:3], what_if=(0.1, 1.0))
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": []}}}))
    return folder


@pytest.mark.timeout(0)
@examples(0.1)
@given(found=st.lists(damages(), min_size=1, max_size=4))
def test_a_damaged_run_does_not_take_the_page_of_the_others(made, tmp_path, found):
    folder = restored(made, tmp_path / "mine")
    damage(folder / "1", found)
    text = write(folder).read_text(encoding="utf-8")
    assert 'data-run="0"' in text
    assert 'data-run="2"' in text
    assert "unreadable" not in text  # the net below the page caught nothing
    # A run alone.
    try:
        write(folder / "1")
    except NoRunError:
        assert not (folder / "1" / "status.json").exists()
    assert [run.state for run in read(folder).runs if run.number in "02"] == ["finished"] * 2
    said = earlier_record(folder, "fedcba9876543210")
    try:
        record = SweepRecord.find(folder)
    except (OSError, ValueError):
        assert said is not None
    else:
        for entry in record.entries if record else ():
            load_status(entry, folder, record.objective)
        if record:
            assert live.table(record)
            record.write(folder)
            assert SweepRecord.read(folder) is not None
