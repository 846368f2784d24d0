"""``python -m runner bench``: tables run, and are printed and recorded."""

import json
import math
import signal

import pytest
import torch

from runner.bench import TABLES
from runner.bench.timing import row
from runner.cli.main import main
from runner.train import stop
from tests.process import python


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tables", [("clip",), pytest.param(tuple(TABLES), marks=pytest.mark.slow)])
def test_tables_are_printed_and_recorded(tables, tmp_path):
    folder = tmp_path / "out"
    words = ["--quick", "--peers", "--pairs", "1", "--device", "cpu", "--output", str(folder)]
    printed = python("-m", "runner", "bench", *tables, *words, timeout=800).stdout
    text = (folder / "bench.txt").read_text()
    assert printed == f"{text}\n{folder / 'bench.json'}\n"
    found = json.loads((folder / "bench.json").read_text())
    assert tuple(found["tables"]) == tables
    for name, table in found["tables"].items():
        assert f"\n{name}: " in text
        assert all(math.isfinite(each["median"]) for each in table["rows"])
    assert "cores" in found["machine"]
    assert f"torch {torch.__version__.partition('+')[0]}" in found["versions"]
    assert set(found["peers"]) == {"timm", "lightning", "accelerate"}
    assert found["command"].startswith(f"python -m runner bench {tables[0]}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clips"], "clips is no table: use clip, parallel"),
        (["start", "--output", "."], "holds an earlier benchmark"),
        (["clip", "--device", "cuda", "--output", "out"], "no CUDA device"),
    ],
)
def test_a_wrong_request_measures_nothing(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "bench.json").write_text("{}")
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_a_table_that_cannot_be_measured_fails_with_its_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("runner.bench.loop.ANSWERS", {"--help": 3})
    words = ["--quick", "--output", str(tmp_path / "out")]
    assert main(["bench", "start", *words]) == 1
    assert "ended with 0, not 3" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_training_ends_the_benchmark(tmp_path, monkeypatch, number, code):
    def rows(setting):
        assert not stop.requested()  # as a training does
        stop.request(number)
        yield row("first", [1.0])
        raise AssertionError("it goes on")

    monkeypatch.setattr("runner.bench.loop.rows", rows)
    assert main(["bench", "loop", "--output", str(tmp_path / "out")]) == code
