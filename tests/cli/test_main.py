"""What a person sees before anything heavy is imported, and when Ctrl-C is typed at any stage."""

import re
import sys
from pathlib import Path

import pytest

from tests.process import python
from tests.terminal import on_a_terminal

SHORT = ["tracker=none", "train.max_duration=3ba", "device=cpu"]
LONG = ["tracker=none", "train.max_duration=100000ba", "device=cpu"]
READING = "clip-runner: reading the configuration ...\n"
IMPORTING = "clip-runner: importing torch, then checking model and data ...\n"

# The command; says when a module begins to be imported.
TRACED = """
import sys
class Trace:
    def find_spec(self, name, path=None, target=None):
        if name in ("hydra", "torch", "torch.nn", "runner.train.job"):
            print("import", name, file=sys.stderr, flush=True)
sys.meta_path.insert(0, Trace())
from runner.cli.main import start
sys.exit(start())
"""


def test_a_terminal_is_told_at_once_what_is_being_done(environment):
    seen, code = on_a_terminal([sys.executable, "-c", TRACED, *SHORT], environment)
    assert code == 0, seen
    assert seen.startswith(READING + "import hydra\n"), seen
    assert seen.index(IMPORTING) < seen.index("import torch")
    (folder,) = Path(environment["RUNNER_OUTPUTS"], "runs").iterdir()
    assert seen.splitlines()[-1] == str(folder / "report.html")


@pytest.mark.parametrize("words", [["--version"], ["--cfg", "job"], ["clip=norms"]])
def test_words_that_are_answered_at_once_announce_no_import(environment, words):
    seen, _ = on_a_terminal([sys.executable, "-m", "runner", *words], environment)
    assert IMPORTING not in seen
    assert (READING in seen) == (words == ["clip=norms"])


def test_a_pipe_is_told_only_what_happened(environment):
    done = python("-m", "runner", *SHORT, env=environment)
    (folder,) = Path(environment["RUNNER_OUTPUTS"], "runs").iterdir()
    assert done.stdout == f"{folder / 'report.html'}\n"
    first, second, *_ = done.stderr.splitlines()
    assert first.startswith("step 3/3  loss ")
    assert re.fullmatch(rf"{folder.name}: finished after 3 steps in \d+\.\d s", second)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("import hydra", SHORT),
        ("import torch", SHORT),
        ("import torch", [*SHORT, "plugin=ddp", "plugin.nproc=2"]),
        ("import torch.nn", [*SHORT, "plugin=ddp", "plugin.nproc=2"]),  # its fork server too
        ("import runner.train.job", SHORT),
    ],
)
def test_ctrl_c_before_training_ends_in_one_sentence(environment, at, words):
    command = [sys.executable, "-c", TRACED, *words]
    seen, code = on_a_terminal(command, environment, interrupt=lambda seen: at in seen)
    assert code == 130, seen
    told = seen.partition("^C")[2]
    lines = [line for line in told.splitlines() if line and not line.startswith("import ")]
    lines = [line for line in lines if not line.startswith("0/3 |")]
    if at == "import runner.train.job":  # the run has begun, so it has a folder
        assert re.fullmatch(r"\S+: interrupted", lines[0])
        assert lines[1].endswith("report.html")
        assert len(lines) == 2
    else:
        assert lines == ["interrupted"], seen


def test_ctrl_c_while_a_plan_imports_ends_in_one_word(environment):
    command = [sys.executable, "-c", TRACED, "plan", *SHORT]
    seen, code = on_a_terminal(command, environment, interrupt=lambda seen: "import hydra" in seen)
    assert code == 130, seen
    told = seen.partition("^C")[2].splitlines()
    assert [line for line in told if line and not line.startswith("import ")] == ["interrupted"]


@pytest.mark.parametrize("words", [[], ["plugin=ddp", "plugin.nproc=2"]])
def test_ctrl_c_while_training_ends_in_one_sentence_and_the_report(environment, words):
    command = [sys.executable, "-m", "runner", *LONG, *words]
    trains = re.compile(r"[1-9]\d*/100000 ")
    seen, code = on_a_terminal(
        command, environment, interrupt=lambda seen: bool(trains.search(seen))
    )
    assert code == 130, seen
    (folder,) = Path(environment["RUNNER_OUTPUTS"], "runs").iterdir()
    *_, bar, told, report = seen.splitlines()
    assert "/100000 " in bar
    assert re.fullmatch(rf"{folder.name}: interrupted after \d+ of 100000 steps", told)
    assert report == str(folder / "report.html")
    assert "Traceback" not in seen
    assert "[" not in seen.partition("^C")[2]


def test_a_command_that_is_misspelled_is_named(environment):
    done = python("-m", "runner", "calibrte", "seed=1", env=environment, code=2)
    assert done.stderr == "clip-runner: calibrte is no command: did you mean calibrate?\n"
