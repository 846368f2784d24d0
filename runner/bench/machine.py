"""Describe the machine, the versions and the other libraries of a benchmark."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PEERS = {
    "timm": "timm",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "Composer": "mosaicml",
}
"""Libraries that are measured with ``--peers``, and the package of each."""


def machine(device: str) -> dict[str, Any]:
    """Return the processor, its cores, the settings of its threads, and the accelerator.

    Args:
        device: device of the measurements.
    """
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_MMAP_THRESHOLD_"):
        if name in os.environ:
            found[name] = os.environ[name]
    if device != "cpu":
        import torch

        found["device"] = torch.cuda.get_device_name(device)
    return found


def peers() -> dict[str, str | None]:
    """Return the version of each library of :data:`PEERS`, None where it is not installed."""
    return {name: _version(package) for name, package in PEERS.items()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
