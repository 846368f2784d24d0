"""The page is one file that agrees with the runs, and so do its tables for other programs."""

import base64
import csv
import hashlib
import json
import re
from html import unescape
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs_version

from runner.cli.main import main
from runner.report import read_run, write
from tests.process import python
from tests.report.examples import HOSTILE, NORM, config, rows, sweep, troubled, write_run


@pytest.fixture(scope="module")
def troubled_sweep(tmp_path_factory):
    """A sweep with runs that diverged, failed, were killed or never began, and its page."""
    folder = troubled(tmp_path_factory.mktemp("page") / "s")
    return folder, write(folder, 1).read_text()


def test_the_page_tells_how_many_runs_are_left(troubled_sweep):
    _, page = troubled_sweep
    assert "still running when this page was written, with 1 run left." in page


def test_runs_that_did_not_finish_show_their_state(troubled_sweep):
    _, page = troubled_sweep
    columns = re.findall(r'<th [^>]*data-key="([^"]*)"', page)[1:]
    shown = {
        run: dict(zip(columns, re.findall(r"<td[^>]*>(.*?)</td>", row), strict=True))
        for run, row in re.findall(r'<tr[^>]*data-run="(\d)"(.*?)</tr>', page, re.DOTALL)
    }
    states = ["failed", "killed", "not started"]
    assert [shown[run]["state"] for run in "789"] == states
    assert (shown["6"]["final/eval/loss"], shown["8"]["steps"]) == ("NaN", "77")
    # The loss doubles from step 181 on, and is over its start a few steps later.
    [step] = re.findall(r"diverged at (\d+)", shown["6"]["state"])
    assert 181 <= int(step) <= 193
    for part in ("Run 7 failed at step 120: RuntimeError", "Run 8 was killed at step 77"):
        assert part in page


def test_links_lead_to_files_of_runs(troubled_sweep):
    folder, page = troubled_sweep
    html = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    links = [unescape(link) for link in re.findall(r'<a [^>]*href="([^"]*)"', html)]
    places = [f"#{place}" for place in re.findall(r' id="([^"]*)"', html)]
    assert {"6/metrics.jsonl", "#run-6"} < set(links)
    assert all(link in places or (folder / link).exists() for link in links)


def test_the_page_is_one_file_that_names_no_other_host(tmp_path):
    page = write(sweep(tmp_path / "s", NORM, steps=50)).read_text()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    folder = resources.files("runner.report").joinpath("plotly")
    script = folder.joinpath("plotly-cartesian.min.js").read_text(encoding="utf-8")
    assert (len(scripts), scripts[0]) == (2, script)
    for outward in ("http://", "https://", "//cdn", "@import", "url(http"):
        assert outward not in page.replace(script, "")
    (policy,) = re.findall(r'content="(default-src .*?)"', page)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    named = " ".join(f"'sha256-{digest.decode()}'" for digest in hashes)
    assert "default-src 'none'" in unescape(policy)
    assert f"script-src {named};" in unescape(policy)
    about = json.loads(folder.joinpath("about.json").read_text())
    assert about["version"] == get_plotlyjs_version()
    assert hashlib.sha256(script.encode()).hexdigest() == about["sha256"]
    assert f"plotly.js (cartesian - minified) v{about['version']}" in script[:200]
    assert "MIT License" in folder.joinpath("LICENSE").read_text()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    lines = rows(steps=10_000, evaluations=50)
    folder = tmp_path_factory.mktemp("page") / "run"
    return write_run(folder, lines, config(), state="running", torn=True)


def test_the_page_of_a_long_run_is_small(long_run):
    assert read_run(long_run).steps == 10_000
    assert write(long_run).stat().st_size <= 2e6


def test_the_same_page_is_written_again(long_run):
    first = write(long_run).read_text()
    assert write(long_run).read_text() == first


def test_reading_imports_no_heavy_library():
    code = "import sys, runner.cli.pages; print(*{name.split('.')[0] for name in sys.modules})"
    imported = set(python("-c", code).stdout.split())
    assert "runner" in imported
    assert not imported & {"torch", "hydra", "wandb", "omegaconf", "plotly"}


def test_the_command_prints_where_the_page_is(tmp_path, capsys):
    folder = write_run(tmp_path / "run", rows(steps=10), config())
    assert main(["report", str(folder)]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder / "report.html"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("missing", "empty", "file"):  # no runs: one message and exit code 2
        assert main(["report", str(tmp_path / name)]) == 2, name
        printed = capsys.readouterr()
        assert (printed.out, len(printed.err.splitlines())) == ("", 2), name
        assert name in printed.err, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sweep of four thresholds and no clipping with three seeds, and all that is exported."""
    settings = [*NORM, ("none", None)]
    folder = sweep(tmp_path_factory.mktemp("s") / "s", settings, (0, 1, 2), steps=60)
    assert main(["report", str(folder), "--csv", "--latex", "report.baseline=none", "--json"]) == 0
    return folder


def of_csv(folder):
    with (folder / "report.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def summaries_of(folder):
    files = [folder / str(number) / "summary.json" for number in range(15)]
    return [json.loads(file.read_text()) for file in files]


def test_csv_has_all_digits_of_the_summaries(folder):
    for row, summary in zip(of_csv(folder), summaries_of(folder), strict=True):
        for part in ("best", "final"):
            assert float(row[f"{part}/eval/loss"]) == summary[part]["eval/loss"]
        assert float(row["clip/ratio_total"]) == summary["clip/ratio_total"]
        assert float(row["grad/norm/p90"]) == summary["grad/norm"]["p90"]


def test_csv_has_the_keys_in_which_runs_differ(folder):
    table = of_csv(folder)
    keys = {key for key in table[0] if "." in key} | {"seed"} & set(table[0])
    assert keys == {"clip.mode", "clip.threshold", "seed"}  # only what differs
    assert [row["clip.threshold"] for row in table[::3]] == ["0.1", "0.25", "1.0", "2.0", ""]
    assert [row["seed"] for row in table[:3]] == ["0", "1", "2"]


def test_json_has_the_differences_to_the_baseline(folder):
    whole = json.loads((folder / "report.json").read_text())
    assert (whole["compared_with"], whole["metric"]) == ("none", "eval/loss")
    losses = [summary["best"]["eval/loss"] for summary in summaries_of(folder)]
    scores = np.array(losses).reshape(5, 3)
    differences = {setting["setting"]: setting["difference"] for setting in whole["settings"]}
    values = [differences[name]["value"] for name in ("0.1", "0.25", "1.0", "2.0")]
    assert values == pytest.approx((scores[:4] - scores[4]).mean(axis=1))
    assert differences["none"] is None


def test_json_has_the_verdict_of_the_page(folder):
    verdict = json.loads((folder / "report.json").read_text())["verdict"]
    assert verdict.startswith("Which threshold? ")
    assert verdict in (folder / "report.html").read_text()


def test_json_has_the_command_of_the_sweep(folder):
    commands = json.loads((folder / "report.json").read_text())["commands"]
    assert commands["sweep"].startswith("python -m runner -m clip=norm")


def test_json_has_the_settings_by_their_means(folder):
    settings = json.loads((folder / "report.json").read_text())["settings"]
    means = [setting["mean"] for setting in settings]
    assert means == sorted(means)
    assert "clearly better" in {setting["worth"] for setting in settings}


def test_latex_has_one_row_a_setting(folder):
    lines = (folder / "report.tex").read_text().splitlines()
    ended = [line[:-3] for line in lines if line.endswith(r" \\")]
    table = [re.split(r" (?<!\\)& ", line) for line in ended]
    settings = json.loads((folder / "report.json").read_text())["settings"]
    names = ["clip.mode", "clip.threshold", "eval/loss", r"$\Delta$ to none", "p", "seeds"]
    assert (table[0], len(table) - 1) == (names, len(settings))
    for row, setting in zip(table[1:], settings, strict=True):
        assert (len(row), row[-1]) == (len(names), "3")
        mean, deviation = map(float, row[2].split(r" $\pm$ "))
        assert (mean, deviation) == pytest.approx((setting["mean"], setting["sd"]), rel=0.05)


def test_text_of_a_configuration_stays_text(tmp_path):
    folder = troubled(tmp_path / "a_b % & # $ {x} ~ ^ \\")
    assert main(["report", str(folder), "--latex", "--csv", "--json"]) == 0
    table = {row["run"]: row for row in of_csv(folder)}
    assert table["6"]["model.name"] == HOSTILE
    ended = {"7": "failed", "8": "killed", "9": "not started"}
    assert {run: row["state"] for run, row in table.items() if int(run) > 6} == ended
    json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
    body = (folder / "report.tex").read_text().partition("\n")[2]
    # What LaTeX takes for a command, a comment or an option stands behind a backslash.
    assert not re.search(r"(?<!\\)[#%]|^\[", body, re.MULTILINE)
    assert body.count("{") == body.count("}")


@pytest.mark.parametrize("word", ["report.baseline=norm 0.26", "report.baselin=none", "clip=norm"])
def test_a_wrong_baseline_is_refused_before_anything_is_written(tmp_path, word, capsys):
    folder = sweep(tmp_path / "s", NORM, steps=5)
    assert main(["report", str(folder), "--csv", word]) == 2
    assert re.search(r"0\.25|report\.baseline", capsys.readouterr().err)
    assert not list(folder.glob("report.*"))


def test_a_cell_that_a_spreadsheet_would_compute_is_text(tmp_path):
    formulas = ["=1+1", "+cmd|x", "-2+3", "@SUM(A1)", "-0.5", "1e-3", "plain"]
    for number, text in enumerate(formulas):
        changed = {"seed": 0, "model": {"_target_": "m.N", "=key": text, "note": text}}
        write_run(tmp_path / "s" / str(number), rows(steps=5), config() | changed)
    assert main(["report", str(tmp_path / "s"), "--csv"]) == 0
    cells = [row["model.note"] for row in of_csv(tmp_path / "s")]
    assert sorted(cells) == sorted(["'=1+1", "'+cmd|x", "'-2+3", "'@SUM(A1)", *formulas[4:]])
