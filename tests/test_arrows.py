"""Which folder of ``runner/`` may import which: downwards only, read from the source."""

import ast
import sys
from pathlib import Path

import pytest

import runner

ROOT = Path(runner.__file__).parent

ARROWS = {
    "cli": {
        *("compose", "sweep", "verify", "calibrate", "bench", "report", "dashboard", "launch"),
    },
    "sweep": {"launch", "compose", "run_folder", "report"},
    "launch": {"train", "telemetry", "run_folder", "report"},
    "verify": {"launch", "train", "compose"},
    "calibrate": {"launch", "train", "compose"},
    "bench": {"launch", "train", "compose"},
    "train": {"checkpoint", "booster", "telemetry", "optim", "data", "models"},
    "checkpoint": {"booster", "run_folder"},
    "telemetry": {"clip", "run_folder", "optim"},
    "booster": {"parallel", "clip", "data"},
    "parallel": {"clip"},
    "dashboard": {"telemetry", "run_folder"},
    "report": {"run_folder"},
    "compose": set(),
    "run_folder": set(),
    "optim": set(),
    "clip": set(),
    "data": set(),
    "models": set(),
    "config": set(),
}
"""What each folder is built on. It may also import what these are built on, and ``config``."""

FOREIGN = {
    "config": {"torch", "hydra", "wandb"},
    "compose": {"torch", "wandb"},
    "clip": {"hydra", "omegaconf", "wandb", "numpy"},
    "parallel": {"hydra", "omegaconf", "wandb"},
    "booster": {"hydra", "omegaconf", "wandb"},
    "optim": {"hydra", "omegaconf", "wandb"},
    "run_folder": {"torch", "hydra", "omegaconf", "wandb"},
    "report": {"torch", "hydra", "omegaconf", "wandb"},
}
"""Libraries that a folder does not import."""


def below(folder: str) -> set[str]:
    """All folders that ``folder`` may import, itself included."""
    found = {folder, "config"}
    for other in ARROWS[folder]:
        found |= below(other)
    return found


def imported(file: Path) -> set[str]:
    """Dotted names that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_folder_has_its_arrows_and_nothing_is_loose():
    entries = {entry.name for entry in ROOT.iterdir() if entry.name != "__pycache__"}
    files = {"__init__.py", "__main__.py", "py.typed"}
    assert entries - files - {"_conf", "_recipes"} == set(ARROWS)


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_go_down(folder):
    allowed = below(folder)
    for file in (ROOT / folder).rglob("*.py"):
        for name in imported(file):
            top, *rest = name.split(".")
            if top == "runner":
                assert rest[0] in allowed or name == "runner.__version__", f"{file}: {name}"
            else:
                assert top not in FOREIGN.get(folder, ()), f"{file}: {name}"


def test_clip_knows_torch_alone():
    for file in (ROOT / "clip").rglob("*.py"):
        others = {name.split(".")[0] for name in imported(file)} - sys.stdlib_module_names
        assert others <= {"torch", "runner"}, file


def test_no_folder_is_above_itself():
    for folder, others in ARROWS.items():
        for other in others:
            assert folder not in below(other), (folder, other)
