"""Versions of the packages and of the code that a run was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("clip-runner", "torch", "torchvision", "hydra-core", "wandb")


def provenance() -> dict[str, str]:
    """Return ``versions`` and, in a git checkout, ``git``: the commit, and whether files differ."""
    made = {"versions": ", ".join([f"python {platform.python_version()}", *_versions()])}
    if state := _git():
        made["git"] = state
    return made


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a checkout that was never installed
            continue
    return found


def _git() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
