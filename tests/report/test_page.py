from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs_version

from runner.cli.report import main
from runner.report import read_run, write
from tests.process import python
from tests.report.examples import NORM, config, rows, sweep, troubled, write_run


class Table(HTMLParser):
    """The values of the table of runs: by run, by key."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.keys: list[str] = []
        self.values: dict[str, dict[str, str]] = {}
        self._row: list[str] = []
        self._run: str | None = None
        self._inside = False
        self.feed(page)

    def handle_starttag(self, name: str, attributes: list[tuple[str, Any]]) -> None:
        of = dict(attributes)
        if name == "table":
            self._inside = of.get("id") == "runs"
        if not self._inside:
            return
        if name == "th" and "data-key" in of:
            self.keys.append(of["data-key"])
        if name == "tr":
            self._run, self._row = of.get("data-run"), []
        if name in ("th", "td") and "data-value" in of:
            self._row.append(of["data-value"])

    def handle_endtag(self, name: str) -> None:
        if name == "table":
            self._inside = False
        if name == "tr" and self._inside and self._run is not None:
            self.values[self._run] = dict(zip(self.keys, self._row, strict=True))


def test_the_table_agrees_with_every_runs_summary_and_the_sweeps_record(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", [*NORM, ("none", None)], steps=100)
    table = Table(write(folder).read_text()).values
    record = json.loads((folder / "sweep.json").read_text())
    assert len(table) == 5
    for entry in record["runs"]:
        row = table[str(entry["number"])]
        summary = json.loads((folder / entry["folder"] / "summary.json").read_text())
        assert float(row["best eval/loss"]) == summary["best"]["eval/loss"] == entry["objective"]
        assert float(row["final eval/loss"]) == summary["final"]["eval/loss"]
        assert float(row["clip/ratio_total"]) == summary["clip/ratio_total"]
        for name in ("p50", "p90", "p99", "max"):
            assert float(row[f"grad/norm {name}"]) == summary["grad/norm"][name]
        assert float(row["seconds"]) == summary["wall_s"]
        assert row["state"] == entry["state"]


def test_the_page_is_one_file_that_names_no_other_host(tmp_path: Path) -> None:
    page = write(sweep(tmp_path / "s", NORM, steps=50)).read_text()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    library = resources.files("runner.report").joinpath("plotly/plotly-cartesian.min.js")
    assert scripts[0] == library.read_text(encoding="utf-8")
    # The library has addresses of its own, which the policy forbids; see test_in_browser.
    for outward in ("http://", "https://", "//cdn", "@import", "url(http"):
        assert outward not in page.replace(scripts[0], "")
    (policy,) = re.findall(r'content="(default-src .*?)"', page)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in scripts]
    named = " ".join(f"'sha256-{one.decode()}'" for one in hashes)
    assert "default-src 'none'" in unescape(policy)
    assert f"script-src {named};" in unescape(policy)


def test_the_library_is_the_one_that_plotly_expects() -> None:
    folder = resources.files("runner.report").joinpath("plotly")
    about = json.loads(folder.joinpath("about.json").read_text())
    script = folder.joinpath("plotly-cartesian.min.js").read_bytes()
    assert about["version"] == get_plotlyjs_version()
    assert hashlib.sha256(script).hexdigest() == about["sha256"]
    assert f"plotly.js (cartesian - minified) v{about['version']}".encode() in script[:200]
    assert "MIT License" in folder.joinpath("LICENSE").read_text()


def test_links_lead_to_files_that_are_there(tmp_path: Path) -> None:
    folder = troubled(tmp_path / "s")
    page = write(folder).read_text()
    links: list[str] = []
    places: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, name: str, attributes: list[tuple[str, Any]]) -> None:
            links.extend(value for key, value in attributes if name == "a" and key == "href")
            places.extend(f"#{value}" for key, value in attributes if key == "id")

    Links().feed(page)
    assert {"6/metrics.jsonl", "#run-6"} < set(links)
    assert all(link in places or (folder / link).exists() for link in links)


def test_writing_again_replaces_the_page_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(steps=10), config())
    before = set(folder.iterdir())
    first = write(folder).read_text()
    assert write(folder).read_text() == first
    assert set(folder.iterdir()) - before == {folder / "report.html"}


def test_a_page_that_cannot_be_made_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", rows(steps=10), config())
    page = write(folder)
    old = page.read_text()

    def refuse(self: Path, target: Path) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write(folder)
    assert page.read_text() == old
    assert not list(folder.glob(".report*"))


@pytest.mark.parametrize(
    ("runs", "steps", "megabytes"),
    [(1, 10_000, 2), (16, 2_000, 4)],
)
def test_large_sweeps_stay_within_size(
    tmp_path: Path, runs: int, steps: int, megabytes: float
) -> None:
    made = [json.dumps(row) + "\n" for row in rows(steps=steps, evaluations=50)]
    for number in range(runs):
        threshold = 0.1 * (number + 1)
        folder = write_run(tmp_path / str(number), [], config(clip__threshold=threshold))
        # The same values a little later each time: random lines without drawing each anew.
        shift = number * 7
        moved = [
            line.replace(f'"train/step": {i + 1 + shift},', f'"train/step": {i + 1},', 1)
            for i, line in enumerate(made[shift:])
        ]
        (folder / "metrics.jsonl").write_text("".join(moved))
    page = write(tmp_path)
    assert page.stat().st_size <= megabytes * 1e6


def test_reading_needs_neither_torch_nor_the_rest_of_the_project() -> None:
    code = (
        "import sys, runner.cli.report;"
        "print(*{n.split('.')[0] for n in sys.modules}"
        "& {'torch', 'hydra', 'wandb', 'omegaconf', 'plotly'},"
        "*(n for n in sys.modules if n.startswith('runner.')"
        "and n.split('.')[1] not in ('cli', 'config', 'report', 'run_folder')))"
    )
    assert python("-c", code).stdout.strip() == ""


def test_the_command_writes_the_page_and_prints_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", rows(steps=10), config())
    assert main([str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder / "report.html"


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_a_folder_without_runs_is_one_message_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert name in printed.err


def test_open_shows_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    folder = write_run(tmp_path / "run", rows(steps=10), config())
    assert main([str(folder), "--open"]) == 0
    assert opened == [(folder / "report.html").as_uri()]


def test_a_report_can_be_made_while_a_run_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(steps=50), config(), state="running", torn=True)
    assert write(folder).is_file()
    assert read_run(folder).steps == 50


def test_a_sweep_that_goes_on_says_how_many_runs_are_left(tmp_path: Path) -> None:
    folder = sweep(tmp_path, NORM[:1], steps=20)
    page = write(folder, 1).read_text()
    assert "still running when this page was written, with 1 run left." in page
    assert "Sweep · 1 run<" in write(folder).read_text()
    assert "still running" not in write(folder).read_text()
