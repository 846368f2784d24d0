import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra._internal.utils import get_args_parser

import runner
from runner.cli import main as cli
from runner.cli.main import COMMANDS
from runner.config.problem import Problem, RequestError
from runner.launch import signals
from runner.run_folder.claim import claimed
from tests.mode_names import LISTED, NAMES

ROOT = Path(runner.__file__).parents[1]


@dataclass
class Outcome:
    exit_code: int = 0
    objective: float | None = 0.5
    disk_full: bool = False


class Fakes:
    """Replaces the functions that the command calls after its overrides are checked."""

    def __init__(self):
        self.checked, self.prepared, self.runs, self.joined = [], [], [], 0
        self.refuse = lambda config: []
        self.behave = lambda plain: Outcome()

    def check(self, config, **settings):
        self.checked.append(config)
        if problems := self.refuse(config):
            raise RequestError(problems)

    def run(self, config, plain, folder, words, **settings):
        self.runs.append((plain, folder, words))
        return self.behave(plain)

    def join(self, timeout):
        self.joined += 1
        return 0


@pytest.fixture
def fakes(monkeypatch, outputs):
    fakes = Fakes()
    modules = {
        "train.preflight": SimpleNamespace(check=fakes.check),
        "launch.supervise": SimpleNamespace(run=fakes.run, prepare=lambda configs: None),
        "launch.rank": SimpleNamespace(join=fakes.join),
        "launch.local_ranks": SimpleNamespace(prepare=lambda *all: fakes.prepared.extend(all)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"runner.{name}", module)
        folder, name = name.split(".")
        monkeypatch.setattr(import_module(f"runner.{folder}"), name, module, raising=False)
    return fakes


def test_a_run_gets_its_configuration_its_folder_and_its_words(fakes, tmp_path):
    assert cli.main(["clip=value", "clip.threshold=0.25"]) == 0
    [(plain, folder, words)] = fakes.runs
    assert plain["clip"]["threshold"] == 0.25
    assert "hydra" not in plain
    assert json.loads(json.dumps(plain)) == plain
    assert folder.parent == tmp_path / "outputs" / "runs"
    assert words == ["clip=value", "clip.threshold=0.25"]
    assert {entry.name for entry in folder.iterdir()} == {".hydra", ".run.lock", "runner.log"}
    assert yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) == words


def test_two_runs_never_share_a_folder(fakes):
    for _ in range(2):
        cli.main([])
    assert fakes.runs[0][1] != fakes.runs[1][1]


def test_a_sweep_runs_every_job_in_its_own_folder(fakes, tmp_path):
    assert cli.main(["-m", "clip.threshold=0.1,0.2", "sweep.name=mine"]) == 0
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    assert [run[1] for run in fakes.runs] == [folder / "0", folder / "1"]
    assert [run[0]["clip"]["threshold"] for run in fakes.runs] == [0.1, 0.2]
    assert (folder / "multirun.yaml").is_file()
    assert len(fakes.checked) == 2


def test_runs_of_a_sweep_share_group_and_tag(fakes):
    cli.main(["-m", "seed=1,2", "sweep.name=mine"])
    trackers = [run[0]["tracker"] for run in fakes.runs]
    assert [(tracker["group"], tracker["tags"]) for tracker in trackers] == [("mine", ["mine"])] * 2


def test_a_group_and_tags_that_were_typed_stay(fakes):
    cli.main(["-m", "seed=1,2", "tracker.group=ours", "tracker.tags=[a,b]"])
    trackers = [run[0]["tracker"] for run in fakes.runs]
    assert [(tracker["group"], tracker["tags"]) for tracker in trackers] == [
        ("ours", ["a", "b"])
    ] * 2


def test_flags_may_stand_anywhere(fakes):
    assert cli.main(["seed=1", "-m", "clip=none,norm"]) == 0
    assert len(fakes.runs) == 2


def test_keys_that_only_the_listed_models_have_reach_every_job(fakes):
    assert cli.main(["-m", "model=gpt,lstm", "model.layers=3"]) == 0
    assert [run[0]["model"]["layers"] for run in fakes.runs] == [3, 3]


def test_a_failed_job_does_not_stop_a_sweep_but_fails_it(fakes):
    fakes.behave = lambda plain: Outcome(1 if plain["seed"] == 1 else 0)
    assert cli.main(["-m", "seed=0,1,2"]) == 1
    assert len(fakes.runs) == 3


def test_exit_codes_are_of_this_request_alone(fakes):
    fakes.behave = lambda plain: Outcome(1)
    assert cli.main([]) == 1
    fakes.behave = lambda plain: Outcome(0)
    assert cli.main([]) == 0


def test_an_interrupt_ends_with_130(fakes):
    def interrupt(plain):
        raise KeyboardInterrupt

    fakes.behave = interrupt
    assert cli.main(["-m", "seed=0,1"]) == 130
    assert len(fakes.runs) == 1


def test_termination_ends_with_143(fakes):
    def terminate(plain):
        raise SystemExit(143)

    fakes.behave = terminate
    assert cli.main([]) == 143


def test_a_request_that_torch_refuses_creates_nothing(fakes, tmp_path, capsys):
    fakes.refuse = lambda config: [Problem("precision.name", "fp16", "needs a GPU")]
    assert cli.main(["precision=fp16"]) == 2
    assert "precision.name=fp16  needs a GPU" in capsys.readouterr().err
    assert fakes.runs == []
    assert list(tmp_path.iterdir()) == []


def test_torchs_refusals_of_a_sweep_name_the_job(fakes, capsys):
    fakes.refuse = lambda config: [Problem("log.flush", 2, "no")] if config.log.flush == 2 else []
    assert cli.main(["-m", "log.flush=1,2,3", "seed=1,2"]) == 2
    assert "(in the job log.flush=2 seed=1)" in capsys.readouterr().err
    assert len(fakes.checked) == 3  # the seed makes no difference


def test_equal_jobs_are_checked_by_torch_once(fakes):
    assert cli.main(["-m", "seed=1,1"]) == 0
    assert len(fakes.checked) == 1


def test_a_refusal_inside_a_job_is_a_wrong_request(fakes, capsys):
    def refuse(plain):
        raise RequestError([Problem("data.root", "/nowhere", "no such folder")])

    fakes.behave = refuse
    assert cli.main([]) == 2
    err = capsys.readouterr().err
    assert "data.root=/nowhere" in err
    assert "Traceback" not in err


def test_the_callers_words_and_logging_come_back(fakes, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--something"])
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    cwd = os.getcwd()
    cli.main(["seed=3"])
    assert sys.argv == ["prog", "--something"]
    assert (list(root.handlers), root.level) == before
    assert os.getcwd() == cwd


def test_the_terminal_is_left_to_the_run(fakes, capsys):
    def log(plain):
        logging.getLogger("runner.test").info("for the file")
        logging.getLogger("runner.test").warning("for both")
        return Outcome()

    fakes.behave = log
    cli.main([])
    out, err = capsys.readouterr()
    assert out == ""
    assert "for both" in err
    assert "for the file" not in err
    text = (fakes.runs[0][1] / "runner.log").read_text()
    assert "for the file" in text
    assert "for both" in text


def test_words_come_from_the_command_line_by_default(fakes, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "seed=4"])
    monkeypatch.setattr(signals, "listen", lambda: None)
    monkeypatch.setattr(signals, "ignore", lambda: None)
    assert cli.start() == 0
    assert fakes.runs[0][0]["seed"] == 4


def test_the_first_rank_of_an_outer_launcher_runs(fakes, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["plugin=ddp"]) == 0
    assert len(fakes.runs) == 1
    assert fakes.joined == 0
    assert fakes.prepared == []


def test_the_other_ranks_join_and_create_nothing(fakes, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["plugin=ddp"]) == 0
    assert fakes.joined == 1
    assert fakes.runs == []
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rank", "local_rank", "prints"), [(0, 0, True), (1, 1, False), (2, 0, True), (1, None, False)]
)
def test_one_rank_of_a_machine_says_what_is_wrong_and_the_others_wait_for_it(
    rank, local_rank, prints, fakes, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    assert cli.main(["sed=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("this request cannot be run") == prints
    # torchrun ends every rank when the first one fails.
    assert waited == ([] if prints else [cli.LISTENING])


def test_a_sweep_is_refused_under_an_outer_launcher(fakes, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["-m", "seed=1,2"]) == 2
    assert "without torchrun" in capsys.readouterr().err
    assert fakes.runs == []


def test_a_world_of_one_is_no_outer_launcher(fakes, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["-m", "seed=1,2"]) == 0


@pytest.mark.parametrize("words", [["--help"], ["--help", "clip=value"], ["-h"]])
def test_help_names_groups_keys_recipes_and_exit_codes(words, fakes, capsys):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    for part in (
        LISTED,
        "clip.threshold=",
        "train.max_duration=15ep",
    ):
        assert part in out
    for part in (
        "cifar10_resnet34 ",
        "accumulate_4",
        "143 terminated",
        "python -m runner -m",
    ):
        assert part in out
    assert "hydra/" not in out


def test_help_shows_the_values_that_hold(fakes, capsys):
    cli.main(["--help", "clip=value", "seed=9"])
    out = capsys.readouterr().out
    assert "clip.threshold=0.5" in out
    assert "seed=9" in out


def test_help_names_a_recipe_that_cannot_be_read(fakes, capsys, monkeypatch, tmp_path):
    from runner.compose import recipes

    (tmp_path / "torn.yaml").write_text("# torn: $x.\na: {")
    monkeypatch.setattr(recipes, "find", lambda name: tmp_path)
    assert cli.main(["--help"]) == 0
    assert "torn.yaml cannot be read: line" in capsys.readouterr().out


def test_the_configuration_can_be_printed(fakes, capsys, tmp_path):
    assert cli.main(["--cfg", "job", "clip=adaptive"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["clip"]["mode"] == "adaptive"
    assert cli.main(["--cfg", "job", "-p", "clip"]) == 0
    assert cli.main(["--info", "defaults"]) == 0
    assert "clip/norm" in capsys.readouterr().out
    assert fakes.checked == fakes.runs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info"]])
def test_wrong_words_are_refused_beside_any_flag(flags, fakes, capsys):
    assert cli.main([*flags, "clip=nrom"]) == 2
    assert "did you mean norm?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["plan"], ["calibrate"], ["verify"]])
def test_the_version(command, capsys):
    assert cli.main([*command, "--version"]) == 0
    assert capsys.readouterr().out.startswith(f"clip-runner {runner.__version__}")


def test_hydras_help_and_full_errors_stay_within_reach(fakes, capsys, monkeypatch):
    assert cli.main(["--hydra-help"]) == 0
    assert "--shell-completion" in capsys.readouterr().out
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert cli.main(["sed=1"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ["runner", "--help"],
        ["runner", "--version"],
        ["runner", "--cfg", "job"],
        ["runner", "--info"],
        ["runner", "--hydra-help"],
        ["runner", "plan", "--help"],
        ["runner", "calibrate", "--help"],
        ["runner", "verify", "--help"],
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_early_is_no_error(words, unbuffered):
    """As ``head`` does, which may be gone before the first line or leave after it."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_does_not_hide_the_exit_code(monkeypatch):
    def command(arguments):
        print("not read")
        return 3

    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        monkeypatch.setattr(cli, "_command", command)
        assert cli.main([]) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clip=norm", "clip=value"], "clip is given 2 times: clip=value holds"),
        (
            ["clip.threshold=1", "seed=1", "clip.threshold=2"],
            "clip.threshold=2 holds, since it com",
        ),
        (["seed=1", "++seed=2", "seed=3"], "seed is given 3 times: seed=3 holds"),
        (["-m", "seed=1,2", "seed=3,4"], "seed is given 2 times: seed=3,4 holds"),
    ],
)
def test_a_key_or_group_that_is_given_twice_is_told_of(words, said, fakes, capsys):
    assert cli.main(words) == 0
    err = capsys.readouterr().err
    assert err.count("clip-runner: note: ") == 1
    assert said in err


@pytest.mark.parametrize("words", [["clip=value", "clip=value"], ["clip=value", "seed=1"]])
def test_what_is_given_once_or_alike_needs_no_note(words, fakes, capsys):
    assert cli.main(words) == 0
    assert capsys.readouterr().err == ""


def test_what_the_last_of_two_says_is_what_runs(fakes):
    cli.main(["clip=norm", "clip=value"])
    assert fakes.runs[0][0]["clip"]["mode"] == "value"


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "tensor", "pipeline", "moe", "hybrid"])
def test_a_plugin_that_has_one_rank_is_told_of(plugin, fakes, capsys):
    assert cli.main([f"plugin={plugin}", "device=cpu"]) == 0
    err = capsys.readouterr().err
    assert err == (
        f"clip-runner: note: plugin={plugin} runs on one rank: plugin.nproc is not given, and this "
        "run uses at most one GPU. plugin.nproc=2 starts two ranks.\n"
    )


def test_a_sweep_tells_of_one_rank_once_for_each_plugin(fakes, capsys):
    assert cli.main(["-m", "plugin=ddp,fsdp", "seed=1,2", "device=cpu"]) == 0
    err = capsys.readouterr().err
    assert [err.count(f"plugin={plugin} runs on one rank") for plugin in ("ddp", "fsdp")] == [1, 1]


@pytest.mark.parametrize(
    "words", [["plugin=single"], ["plugin=ddp", "plugin.nproc=1"], ["plugin=ddp", "plugin.nproc=2"]]
)
def test_ranks_that_are_asked_for_need_no_note(words, fakes, capsys):
    assert cli.main([*words, "device=cpu"]) == 0
    assert capsys.readouterr().err == ""


def test_ranks_that_torchrun_started_need_no_note(fakes, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["plugin=ddp"]) == 0
    assert capsys.readouterr().err == ""


def test_help_names_every_command_and_every_flag(fakes, capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert set(COMMANDS) >= {"calibrate", "verify", "plan", "report", "dashboard"}
    for command in set(COMMANDS) - {"run"}:
        assert f"python -m runner {command} " in out
    known = {name for action in get_args_parser()._actions for name in action.option_strings}
    unneeded = {
        "--run",
        "-r",
        "--experimental-rerun",
        "--shell-completion",
        "-sc",
    }  # the default; not supported
    described = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", out))
    assert known - unneeded | {"--version"} <= described


def test_help_lists_the_options_of_another_folder(fakes, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: package.Mine\n")
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "gentle.yaml").write_text("defaults: [norm]\nthreshold: 5.0\n")
    assert cli.main(["--config-dir", str(tmp_path), "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  model .*\bgpt, .*\bmine\b", out, re.MULTILINE)
    assert f"  {', '.join(sorted([*NAMES, 'gentle']))}\n" in out
    assert cli.main(["--help"]) == 0
    assert "gentle" not in capsys.readouterr().out


def content_of(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "folder",
    ["../..", "..", ".", "", "{home}/victim", "0/../../../../victim", "0/below", "earlier"],
)
def test_a_record_of_a_sweep_that_names_another_folder_is_refused(fakes, tmp_path, capsys, folder):
    words = ["-m", "seed=1,2", "sweep.name=mine"]
    assert cli.main(words) == 0
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("x")
    file = tmp_path / "outputs" / "sweeps" / "mine" / "sweep.json"
    record = json.loads(file.read_text())
    record["runs"][0]["folder"] = folder.format(home=tmp_path)
    file.write_text(json.dumps(record))
    before = content_of(tmp_path)
    assert cli.main(words) == 2
    assert content_of(tmp_path) == before
    assert "the runs of a sweep lie directly in its own folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["0", "earlier"])
def test_a_sweep_writes_through_no_link(fakes, tmp_path, capsys, name):
    words = ["-m", "seed=1,2", "sweep.name=mine"]
    assert cli.main(words) == 0
    sweep = tmp_path / "outputs" / "sweeps" / "mine"
    (tmp_path / "victim").mkdir()
    if name == "0":
        shutil.rmtree(sweep / "0")
    (sweep / name).symlink_to(tmp_path / "victim")
    before = content_of(tmp_path)
    assert cli.main(words) == 2
    after = content_of(tmp_path)
    assert {path: after[path] for path in before} == before
    assert "is a symbolic link" in capsys.readouterr().err


def test_the_folders_of_the_runs_of_a_sweep_have_no_slash(fakes, capsys):
    assert cli.main(["-m", "seed=1,2", "hydra.sweep.subdir=../../x"]) == 2
    assert "hydra.sweep.subdir=../../x" in capsys.readouterr().err
    assert fakes.runs == []


def test_the_second_run_in_a_folder_is_refused(fakes, tmp_path, capsys):
    folder = tmp_path / "run"
    with claimed(folder):
        before = content_of(folder)
        assert cli.main([f"hydra.run.dir={folder}"]) == 2
        assert content_of(folder) == before
    assert f"another run is using this folder (process {os.getpid()}" in capsys.readouterr().err
    assert cli.main([f"hydra.run.dir={folder}"]) == 0


def test_resume_is_typed_and_explained_as_one_key(fakes, tmp_path, capsys):
    assert cli.main([f"resume={tmp_path}/nowhere"]) == 2
    said = capsys.readouterr().err
    assert f"resume={tmp_path}/nowhere" in said
    assert "must be auto, never, or the path of a run or checkpoint" in said
    assert not (tmp_path / "outputs").exists()
    assert cli.main(["--help"]) == 0
    assert "  resume=auto " in capsys.readouterr().out
    assert cli.main(["resume=never"]) == 0
    assert fakes.runs[0][0]["resume"] == {"from": "never", "force": False}
