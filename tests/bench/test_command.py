"""``python -m runner bench``: every table runs, and is printed and recorded."""

import json
import math
import signal

import pytest
import torch

from runner.bench import TABLES
from runner.bench.pairs import Spread
from runner.bench.table import Row
from runner.cli.main import main
from runner.train import stop
from tests.process import python


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What ``bench --quick`` printed, and its folder."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    words = ["bench", "--quick", "--peers", "--device", "cpu", "--output", str(folder)]
    return python("-m", "runner", *words, timeout=230).stdout, folder


@pytest.mark.xdist_group("bench")
@pytest.mark.slow
def test_quick_measures_every_table(quick):
    _, folder = quick
    found = json.loads((folder / "bench.json").read_text())
    assert tuple(found["tables"]) == TABLES
    for name, table in found["tables"].items():
        assert table["rows"], name
        for row in table["rows"]:
            assert math.isfinite(row["median"]), row
            assert row["q1"] <= row["median"] <= row["q3"], row
    errors = [row for row in found["tables"]["clip"]["rows"] if row["unit"] == "error"]
    assert all(row["median"] <= row["limit"] for row in errors if row["limit"])


@pytest.mark.xdist_group("bench")
@pytest.mark.slow
def test_the_record_says_what_was_measured_on_what(quick):
    _, folder = quick
    found = json.loads((folder / "bench.json").read_text())
    assert found["machine"]["cpu"]
    assert found["machine"]["cores"] >= 1
    assert f"torch {torch.__version__.partition('+')[0]}" in found["versions"]
    assert set(found["peers"]) == {"timm", "Lightning", "Accelerate", "Composer"}
    assert found["command"].startswith("python -m runner bench --quick --peers")


@pytest.mark.xdist_group("bench")
@pytest.mark.slow
def test_the_text_is_what_was_printed(quick):
    printed, folder = quick
    text = (folder / "bench.txt").read_text()
    assert printed == f"{text}\n{folder / 'bench.json'}\n"
    assert all(f"\n{name}: " in text for name in TABLES)
    assert "not installed" in text or "peers: " in text


def test_an_unknown_table_is_refused_before_torch_is_imported(capsys):
    assert main(["bench", "clips"]) == 2
    assert "clips is no table: use clip, adaptive" in capsys.readouterr().err


def test_a_folder_that_holds_a_benchmark_is_refused(tmp_path, capsys):
    (tmp_path / "bench.json").write_text("{}")
    assert main(["bench", "page", "--output", str(tmp_path)]) == 2
    assert "holds an earlier benchmark" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["bench", "clip", "--device", "cuda", "--output", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_table_that_cannot_be_measured_fails_with_its_reason(tmp_path, monkeypatch, capsys):
    def rows(setting):
        raise RuntimeError("python -m runner --help ended with 1, not 0")
        yield

    monkeypatch.setattr("runner.bench.start.rows", rows)
    assert main(["bench", "start", "--output", str(tmp_path / "out")]) == 1
    assert "ended with 1, not 0" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_training_ends_the_benchmark(tmp_path, monkeypatch, number, code):
    def rows(setting):
        assert not stop.requested()  # as a training does
        stop.request(number)
        yield Row("first", Spread.of([1.0]))
        raise AssertionError("it goes on")

    monkeypatch.setattr("runner.bench.loop.rows", rows)
    assert main(["bench", "loop", "--output", str(tmp_path / "out")]) == code
