"""Which folder of ``runner/`` may import which: downwards only, read from the source."""

import ast
import sys
from pathlib import Path

import pytest

import runner

ROOT = Path(runner.__file__).parent
ARROWS = {
    "cli": "sweep verify calibrate bench report launch",
    "sweep": "request launch run_folder report",
    "launch": "train telemetry run_folder",
    "verify": "check train telemetry",
    "calibrate": "train telemetry",
    "bench": "request launch train",
    "integrations": "telemetry",
    "check": "clip",
    "clip": "gradients",
    "train": "checkpoint booster telemetry optim data models",
    "checkpoint": "parallel run_folder",
    "telemetry": "clip run_folder optim",
    "booster": "checkpoint parallel clip data",
    "parallel": "gradients",
    "report": "run_folder",
    "request": "run_folder",
    **dict.fromkeys(("run_folder", "optim", "gradients", "data", "models", "config"), ""),
}
"""What each folder is built on. It may also import what these are built on, and ``config``."""
FOREIGN = {
    "config": "torch hydra wandb",
    "request": "torch wandb",
    "clip": "hydra omegaconf wandb numpy",
    "gradients": "hydra omegaconf wandb numpy",
    "check": "hydra omegaconf wandb numpy",
    "parallel": "hydra omegaconf wandb",
    "integrations": "hydra omegaconf wandb",
    "booster": "hydra omegaconf wandb",
    "checkpoint": "hydra omegaconf wandb",
    "optim": "hydra omegaconf wandb",
    "run_folder": "torch hydra omegaconf wandb",
    "report": "torch hydra omegaconf wandb",
}
"""Libraries that a folder does not import."""


def below(folder: str) -> set[str]:
    """All folders that ``folder`` may import, itself included."""
    lower_folders = [below(lower) for lower in ARROWS[folder].split()]
    return {folder, "config", "workarounds"}.union(*lower_folders)


def imported(folder: str) -> set[str]:
    """Dotted names that the modules of a folder import, wherever in them."""
    names: set[str] = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names - {"runner.__version__"}


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_go_down(folder):
    parts = [name.split(".") for name in imported(folder)]
    assert {path[0] for top, *path in parts if top == "runner"} <= below(folder)
    libraries = {top for top, *_ in parts}
    assert not libraries & {*FOREIGN.get(folder, "").split()}
    if folder in ("clip", "check", "gradients"):
        assert libraries - sys.stdlib_module_names <= {"torch", "runner"}


def test_every_folder_has_its_arrows():
    entries = {entry.name for entry in ROOT.iterdir() if entry.name != "__pycache__"}
    files = {"__init__.py", "__main__.py", "py.typed", "workarounds.py"}
    assert entries - files - {"_conf", "_recipes"} == set(ARROWS)


def test_no_folder_is_below_itself():
    for folder, lower in ARROWS.items():
        for name in lower.split():
            assert folder not in below(name), (folder, name)
