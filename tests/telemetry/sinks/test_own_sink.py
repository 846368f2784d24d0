"""A user's own sink, in a module outside of the package, by ``tracker._target_``."""

import json

import pytest

from runner.cli.main import main
from tests.process import run_here

MODULE = '''
class CsvSink:
    """Records steps and losses in a file of their own."""

    def __init__(self, folder, continued_after=None):
        self._file = open(folder / "rows.csv", "w" if continued_after is None else "a")

    def write(self, row):
        print(row["train/step"], row["train/loss"], sep=",", file=self._file)

    def close(self, summary, exit_code):
        print("end", exit_code, summary["steps"], sep=",", file=self._file)
        self._file.close()
'''
SMALL = "model=gpt model.context=32 model.width=32 data=text data.sequence_length=32"
SMALL += " data.max_bytes=60000 train.max_duration=3ba eval.interval=1000ba tracker=none device=cpu"
WRONG = {
    "own_sink.CvsSink": "own_sink has no CvsSink|CsvSink?",
    "json.JSONDecoder": "is no sink|write and close",
    "own_sink": "a full name",
}


@pytest.fixture(autouse=True)
def _importable(tmp_path, monkeypatch):
    (tmp_path / "own_sink.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_takes_every_row_and_the_end(tmp_path):
    folder = tmp_path / "run"
    run_here("tracker._target_=own_sink.CsvSink", *SMALL.split(), f"hydra.run.dir={folder}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [f"{row['train/step']},{row['train/loss']}" for row in rows]
    assert (folder / "rows.csv").read_text().splitlines() == [*expected, "end,0,3"]


def test_what_is_no_sink_is_refused_before_the_run(capsys):
    for target, parts in WRONG.items():
        assert main([f"tracker._target_={target}", *SMALL.split()]) == 2
        message = capsys.readouterr().err
        assert [part for part in ("(1 problem)", *parts.split("|")) if part not in message] == []
