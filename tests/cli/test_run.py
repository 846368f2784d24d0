"""Runs and sweeps as a user calls them, in this process: folders, records, notes, help."""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from html import unescape

import pytest
import yaml

import runner
from runner.cli.main import COMMANDS, main
from runner.config.modes import NAMES
from runner.run_folder import files
from runner.run_folder.status import claimed
from tests.process import ROOT, environment_at, run_here

TINY = [
    *("device=cpu", "tracker=none", "train.max_duration=1ba", "data=synthetic", "data.samples=32"),
    *("data.test_samples=16", "data.batch_size=16", "data.shape=[1,8,8]"),
    "checkpoint.save_final=false",
]


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


WORDS = [*TINY, "clip=value", "clip.threshold=0.25", "resume=never"]


def test_a_run_leaves_the_callers_process_as_it_was(outputs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--something"])
    root = logging.getLogger()
    before = (list(root.handlers), root.level, os.getcwd(), [*sys.argv])
    assert main(WORDS) == 0
    assert (list(root.handlers), root.level, os.getcwd(), sys.argv) == before


once = pytest.mark.xdist_group("runs")  # each command is run once


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """The folders of two runs with the same words, and what both printed."""
    home = tmp_path_factory.mktemp("runs")
    printed = [run_here(*WORDS, env=environment_at(home))[0] for _ in range(2)]
    return list((home / "outputs" / "runs").iterdir()), "".join(printed)


@once
def test_each_run_has_a_folder_of_its_own(repeated):
    folders, printed = repeated
    assert len(folders) == 2
    assert {*printed.splitlines()} == {str(folder / "report.html") for folder in folders}


@once
def test_a_run_records_its_words(repeated):
    for folder in repeated[0]:
        recorded = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
        assert recorded == [*WORDS[:-1], "resume.from=never"]


@once
def test_a_run_records_its_configuration(repeated):
    for folder in repeated[0]:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["clip"]["mode"], config["clip"]["threshold"]) == ("value", 0.25)
        assert config["resume"] == {"from": "never", "force": False}
        assert "hydra" not in config


SWEEP = ["seed=1,2", "-m", "sweep.name=mine", *TINY]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a sweep that ran."""
    home = tmp_path_factory.mktemp("sweep")
    run_here(*SWEEP, env=environment_at(home))
    return home / "outputs" / "sweeps" / "mine"


@pytest.fixture
def mine(finished, outputs):
    """The words of that sweep, and a copy of its folder that a test may change."""
    return SWEEP, shutil.copytree(finished, outputs / "sweeps" / "mine")


@once
def test_a_sweep_runs_every_job_in_a_folder_of_its_own(finished):
    for seed, run in ((1, "0"), (2, "1")):
        config = yaml.safe_load((finished / run / "config.yaml").read_text())
        assert config["seed"] == seed, run


@once
def test_the_runs_of_a_sweep_are_one_group_of_the_tracker(finished):
    for run in ("0", "1"):
        tracker = yaml.safe_load((finished / run / "config.yaml").read_text())["tracker"]
        assert (tracker["group"], tracker["tags"]) == ("mine", ["mine"]), run


@once
def test_the_page_of_a_sweep_repeats_the_command_of_each_run(finished):
    page = (finished / files.PAGE).read_text()
    runs = page.partition('id="files"')[2].partition("</table>")[0]
    shown = re.findall(r"<code>(python -m runner [^<]*)</code>", runs)
    assert len(shown) == 2
    for seed, command in enumerate(shown, 1):
        assert {f"seed={seed}", *TINY} <= {*shlex.split(unescape(command))}


@once
def test_a_plan_says_which_runs_of_a_sweep_are_done(mine, capsys):
    words, sweep = mine
    shutil.rmtree(sweep / "0")
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "1    seed=2  1      done" in out
    assert "1 of 2 to run, 1 step, in" in out


def test_a_plan_lists_every_run(outputs, capsys):
    words = ["plugin=single,ddp", "clip=norm,adaptive", "device=cpu", "train.max_duration=7ba"]
    assert main(["plan", "-m", *words]) == 0
    said = capsys.readouterr()
    header, *rows, summary = (line.split() for line in said.out.splitlines())
    assert header == ["run", "steps", "state"]
    assert [" ".join(row) for row in rows] == [
        "0 plugin=single clip=norm 7 to run",
        "1 plugin=single clip=adaptive 7 to run",
        "2 plugin=ddp clip=norm 7 to run",
        "3 plugin=ddp clip=adaptive 7 to run",
    ]
    assert " ".join(summary).startswith("4 of 4 to run, 28 steps, in")
    assert said.err.count("plugin=ddp runs on one rank: plugin.nproc is not given") == 1
    assert said.err.count("runs on one rank") == 1


def test_a_plan_creates_nothing(outputs):
    assert main(["plan", "-m", "plugin=single,ddp", *TINY]) == 0
    assert not outputs.exists()


@once
def test_a_sweep_stays_in_its_own_folder(mine, tmp_path, capsys):
    words, sweep = mine
    (tmp_path / "victim").mkdir()
    record = json.loads((sweep / "sweep.json").read_text())
    record["runs"][0]["folder"] = f"{tmp_path}/victim"
    (sweep / "sweep.json").write_text(json.dumps(record))
    before = contents(tmp_path)
    assert main(words) == 2
    assert contents(tmp_path) == before
    assert "is no record of a sweep: runs.0.folder" in capsys.readouterr().err


def test_the_second_run_in_a_folder_is_refused(outputs, tmp_path, capsys):
    folder = tmp_path / "run"
    with claimed(folder):
        before = contents(folder)
        assert main([f"hydra.run.dir={folder}", *TINY]) == 2
        assert contents(folder) == before
    assert "another process is using this folder" in capsys.readouterr().err


def test_help_lists_what_can_be_typed(capsys):
    """Commands, options, sections, flags."""
    assert main(["--help", "clip=value"]) == 0
    out = capsys.readouterr().out
    for part in (
        *("percentile", "cifar10_resnet34", "accumulate_4", "early_stopping"),
        *(f"python -m runner {command} " for command in {"-m", *COMMANDS} - {"run"}),
    ):
        assert part in out
    assert {*NAMES} <= {*re.findall(r"\w+", out)}
    assert "hydra/" not in out
    for flag in ("-m", "-h", "--version", "-c", "-p", "--resolve", "-i", "-cd", "-sc", "--json"):
        assert re.search(rf"^  {flag}\b", out, re.MULTILINE)


def test_help_has_60_lines_of_80_columns(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80


def test_help_of_all_lists_every_key_with_the_values_of_the_command(capsys):
    assert main(["--help", "all", "clip=value", "seed=9"]) == 0
    out = capsys.readouterr().out
    for part in ("clip.threshold=0.5", "seed=9", "train.max_duration=15ep", "  resume=auto "):
        assert part in out


@pytest.mark.parametrize(
    ("topic", "first", "count"),
    [
        ("clip.threshold", "  clip.threshold=1.0  lower it to clip more", 1),
        ("clip.skip", "  clip.skip=null ", 7),
        ("clip.mode", "  clip=  adagc, ", 2),
        ("seed", "  seed=0  change it", 1),
        ("recipe", "  accumulate_4  ", 21),
    ],
)
def test_help_of_a_key_lists_the_keys_below_it(topic, first, count, capsys):
    assert main(["--help", topic]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(first)
    assert len(lines) == count


def test_help_explains_the_exit_codes(capsys):
    assert main(["--help"]) == 0
    assert "143 terminated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--cfg job -p tracker --resolve tracker.group=${hydra:job.name}", "group: runner"),
        ("--cfg job -p sweep.name", "null\n"),
        ("--info defaults", "clip/norm"),
        ("-m clip.threshold=1,2 --help clip", "clip.threshold=1.0"),
        ("--hydra-help", "--multirun"),
        ("plan --help", "without running it"),
        ("verify --help", "verify.tolerance"),
        ("calibrate --help", "calibrate.warmup_steps"),
        ("--version", f"clip-runner {runner.__version__}"),
        ("verify --version", f"clip-runner {runner.__version__}"),
    ],
)
def test_a_flag_only_prints_what_it_asks_for(words, part, outputs, capsys):
    assert main(words.split()) == 0
    assert part in capsys.readouterr().out
    assert not outputs.exists()


def test_the_configuration_is_printed_as_yaml(outputs, capsys):
    assert main(["--cfg", "job", "clip=adaptive"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["clip"]["mode"] == "adaptive"
    assert not outputs.exists()


def test_a_shell_completes_options(outputs, capsys, monkeypatch):
    assert main(["-sc", "install=bash"]) == 0
    assert "complete -o nospace" in capsys.readouterr().out
    monkeypatch.setenv("COMP_LINE", "clip-runner plugin=te")
    monkeypatch.setenv("COMP_POINT", "21")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out == "plugin=tensor\n"
    assert not outputs.exists()


def test_the_command_of_a_sweep_has_the_whole_path_of_a_folder_of_options(tmp_path, monkeypatch):
    seen = []
    start = "runner.sweep.control.Sweep.start"
    monkeypatch.setattr(start, lambda sweep: seen.append(sweep.command) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    assert main(["seed=1,2", "--config-dir", "conf", "-m"]) == 0
    assert seen == [["-m", "--config-dir", str(tmp_path / "conf"), "seed=1,2"]]


@pytest.mark.parametrize(("words", "unbuffered"), [("--help", "1"), ("--cfg job", "")])
def test_a_reader_that_leaves_early_is_no_error(words, unbuffered):
    """As ``head`` does, which may be gone before the first line or leave after it."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_report_of_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_in_the_folder_of_another_run_is_refused(tmp_path, capsys):
    (tmp_path / "status.json").write_text("{}")
    assert main(["tracker=none", f"hydra.run.dir={tmp_path}"]) == 2
    printed = capsys.readouterr().err
    assert "holds the record of an earlier run" in printed
    assert "choose another or remove it" in printed


def test_help_of_a_group_has_the_keys_of_the_chosen_option(capsys):
    assert main(["--help", "all", "~report", "~loss"]) == 0
    every = capsys.readouterr().out
    assert main(["--help", "optimizer", "optimizer=adamw"]) == 0
    printed = capsys.readouterr().out
    for text in ("optimizer.lr=0.05", "optimizer.momentum=0.9", "model.width=32"):
        assert f"  {text}" in every
    assert "optimizer=" in printed
    assert "optimizer.betas=[0.9,0.999]" in printed.replace(" ", "")
    assert "model.width" not in printed


def test_a_batch_larger_than_the_data_is_said(outputs, capsys):
    words = ["device=cpu", "tracker=none", "data.batch_size=100000", "train.max_duration=1ba"]
    assert main(words) == 0
    printed = capsys.readouterr().err
    assert "a step has all 1,437 samples of the data, not 100,000" in printed
    assert "cpu, 1 rank (plugin=single), 1,437 samples, " in printed
    (folder,) = (outputs / "runs").iterdir()
    assert str(folder) in printed
