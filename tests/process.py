"""Python in a process of its own, as a user starts it, and the command in this one."""

import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from runner.cli.main import main

ROOT = Path(__file__).resolve().parents[1]


def python(*words, code=0, env=None, timeout=600, cwd=None):
    """Run ``python <words>`` to its end, and return it with what it printed.

    It must exit with ``code`` within ``timeout`` seconds. ``env`` are all its environment
    variables; by default those of this process, and the checkout on ``PYTHONPATH``.
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


def run_here(*words, env=None):
    """Run the command in this process, where torch is imported already; it must succeed.

    ``env`` is as for :func:`python`. Returns what was printed to stdout, and to stderr.
    """
    # A run would make this process keep freed memory, and many other tests follow.
    changed = {**(os.environ if env is None else env), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
    out = StringIO()
    err = StringIO()
    with patch.dict(os.environ, changed, clear=True), redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    assert code == 0, out.getvalue() + err.getvalue()
    return out.getvalue(), err.getvalue()


def overriding(defaults, words):
    """Return the overrides ``words`` after those of ``defaults`` whose keys they do not give."""
    typed_keys = {word.partition("=")[0] for word in words}
    return [*(word for word in defaults if word.partition("=")[0] not in typed_keys), *words]


def environment_at(home):
    """Return environment variables of a command whose runs go to ``home / "outputs"``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "RUNNER_"))}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "RUNNER_OUTPUTS": str(home / "outputs"),
        "HOME": str(home),
        "WANDB_ERROR_REPORTING": "false",
    }


def wait_for(happened, limit=600, shown=str, pause=0.05):
    """Wait until something happened; the message of a failure has what ``shown`` returns.

    Only something that hangs may reach the limit, also on a busy machine.
    """
    until = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < until, shown()
        time.sleep(pause)


def inspected(file):
    """Return the records that wandb's own reader finds in a file, by their kind."""
    return _inspected(file, file.stat().st_mtime_ns)


@cache
def _inspected(file, _):
    said = python("-m", "wandb", "leet", "inspect", "--json", str(file)).stdout
    records = {}
    for record in map(json.loads, said.splitlines()):
        records.setdefault(record["type"], []).append(record.get(record["type"]))
    return records
