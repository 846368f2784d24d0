"""What a terminal or a pipe shows, what is imported for it, and Ctrl-C at any stage."""

import re
import sys
from pathlib import Path

import pytest

from tests.process import environment_at, python
from tests.terminal import on_a_terminal

SHORT = ["tracker=none", "train.max_duration=3ba", "device=cpu"]
RANKS = ["plugin=ddp", "plugin.nproc=2"]
READING = "clip-runner: reading the configuration ...\n"
IMPORTING = "clip-runner: importing torch, then checking model and data ...\n"

# The command; says when a module begins to be imported.
TRACED = """
import sys
class Trace:
    def find_spec(self, name, path=None, target=None):
        if name in ("hydra", "torch", "torch.nn", "runner.launch.rank"):
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
    # A wrong request is answered at once, without torch.
    seen, _ = on_a_terminal([sys.executable, "-m", "runner", "clip=norms"], environment)
    assert (READING in seen, IMPORTING in seen) == (True, False)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("import hydra", ["plan", *SHORT]),
        ("import torch.nn", [*SHORT, *RANKS]),  # its fork server too
        ("import runner.launch.rank", SHORT),
    ],
)
def test_ctrl_c_before_training_ends_in_one_sentence(environment, stage, words):
    command = [sys.executable, "-c", TRACED, *words]
    seen, code = on_a_terminal(command, environment, interrupt=lambda seen: stage in seen)
    assert code == 130, seen
    told = seen.partition("^C")[2]
    lines = [line for line in told.splitlines() if line and not line.startswith("import ")]
    lines = [line for line in lines if not line.startswith("0/3 ")]
    if stage == "import runner.launch.rank":  # the run has begun, so it has a folder
        assert re.fullmatch(r"\S+: interrupted", lines[0])
        assert lines[1].endswith("report.html")
        assert len(lines) == 2
    else:
        assert lines == ["interrupted"], seen


def test_ctrl_c_while_ranks_train_ends_with_the_way_to_continue(environment):
    """How far the run came, how to continue it, and where its page is."""
    words = ["tracker=none", "train.max_duration=100000ba", "device=cpu", *RANKS]
    trains = re.compile(r"[1-9]\d*/100000 ")
    seen, code = on_a_terminal(
        [sys.executable, "-m", "runner", *words],
        environment,
        interrupt=lambda seen: bool(trains.search(seen)),
    )
    assert code == 130, seen
    (folder,) = Path(environment["RUNNER_OUTPUTS"], "runs").iterdir()
    *_, bar, told, to_continue, command, report = seen.splitlines()
    assert to_continue == "clip-runner: to continue:"
    assert command.startswith(f"  python -m runner resume={folder} tracker=none ")
    assert "/100000 " in bar
    assert re.fullmatch(rf"{folder.name}: interrupted after \d+ of 100000 steps", told)
    assert report == str(folder / "report.html")
    assert "Traceback" not in seen
    assert "[" not in seen.partition("^C")[2]


PROGRAM = """
import json, sys
from runner.cli.main import main
codes = [main(words.split()) for words in sys.argv[1:]]
print(json.dumps(codes), *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
UNUSED = {"torchvision", "sklearn", "scipy", "pandas", "wandb", "optuna"}


def test_an_answer_imports_no_library_that_it_does_not_need(tmp_path, environment):
    wrong = ["clip=nrom clip.treshold=1", "-m seed=1,2 clip.treshold=1", "evaluate nowhere"]
    wrong += ["export", "plugin=ddp plugin.nproc=6400", "resume=last", "--help clip.treshold"]
    right = ["--help", "--help all", "--cfg job", "--info", "new demo"]
    done = python("-c", PROGRAM, *right, *wrong, cwd=tmp_path, env=environment)
    codes, names = done.stderr.splitlines()[-1].split("] ")
    assert codes == "[0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2"
    assert not {*names.split()} & (UNUSED | {"torch", "numpy", "asyncio"})


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """The folder of a run whose output goes to pipes, and what it printed; imports come last."""
    home = tmp_path_factory.mktemp("piped")
    done = python("-c", PROGRAM, " ".join(SHORT), cwd=home, env=environment_at(home))
    (folder,) = (home / "outputs" / "runs").iterdir()
    return folder, done


@pytest.mark.xdist_group("piped")  # it runs once
def test_a_run_imports_no_library_that_it_does_not_use(piped):
    _, done = piped
    imported = {*done.stderr.splitlines()[-1].split()}
    assert "torch" in imported
    assert not UNUSED & imported


@pytest.mark.xdist_group("piped")
def test_a_pipe_is_told_only_what_happened(piped):
    folder, done = piped
    assert done.stdout == f"{folder / 'report.html'}\n"
    about, first, second, *_ = done.stderr.splitlines()
    assert about.startswith("clip-runner: cpu, 1 rank (plugin=single), 1,437 samples, ")
    assert first.startswith("step 3/3  ")
    assert re.fullmatch(rf"{folder.name}: finished after 3 steps in \d+\.\d s", second)
