"""Python in a process of its own, as a user starts it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python(
    *words: str,
    code: int = 0,
    env: Mapping[str, str] | None = None,
    timeout: float = 170,
    cwd: Path | None = None,
) -> Any:
    """Run ``python <words>`` to its end, and assert its exit code.

    Args:
        words: arguments of Python.
        code: exit code that it must have.
        env: all its environment variables; by default those of this process, and the checkout on
            ``PYTHONPATH``.
        timeout: seconds after which it is killed.
        cwd: folder that it runs in.

    Returns:
        The ended process, with what it printed as text in ``stdout`` and ``stderr``.
    """
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)} if env is None else env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done
