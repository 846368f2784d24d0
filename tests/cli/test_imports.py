"""A command imports no library that its answer does not need: each takes longer than the answer."""

import pytest

from tests.process import python

PROGRAM = """
import sys
from runner.cli.main import main
code = main(sys.argv[1:])
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=open("imported", "w"))
raise SystemExit(code)
"""

HEAVY = {
    "torch",
    "torchvision",
    "numpy",
    "sklearn",
    "scipy",
    "pandas",
    "wandb",
    "optuna",
    "asyncio",
}


def imported(words, folder, environment, code=0):
    python("-c", PROGRAM, *words.split(), code=code, cwd=folder, env=environment)
    return set((folder / "imported").read_text().split())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("--cfg job", 0),
        ("--info", 0),
        ("clip=nrom clip.treshold=1", 2),
        ("-m seed=1,2 clip.treshold=1", 2),
        ("plan", 0),
        ("new demo", 0),
        ("plan recipe=sweep_norm optimizer=adam optimizer.lr=1e-3", 0),
    ],
)
def test_what_needs_no_torch_imports_no_heavy_library(words, code, tmp_path, environment):
    assert not imported(words, tmp_path, environment, code) & HEAVY


def test_a_run_imports_no_library_that_it_does_not_use(tmp_path, environment):
    words = "tracker=none train.max_duration=2ba device=cpu"
    found = imported(words, tmp_path, environment)
    assert "torch" in found
    assert not found & {"torchvision", "sklearn", "scipy", "pandas", "wandb", "optuna"}
