"""What `auto` means is what wandb itself would do, without asking a server or a person."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.telemetry.sinks.wandb_sink import new_run_id

ROOT = Path(__file__).parents[3]


def test_run_ids_are_unique_whatever_the_seed() -> None:
    ids = set()
    for _ in range(1000):
        random.seed(0)
        ids.add(new_run_id())
    assert len(ids) == 1000
    assert all(re.fullmatch(r"[a-z0-9]{8}", one) for one in ids)


EFFECTIVE = (
    "from runner.telemetry.sinks.wandb_sink import effective_mode; print(effective_mode('auto'))"
)
NETRC = "machine {host}\n  login user\n  password local-" + "b" * 40 + "\n"


def _effective(cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", EFFECTIVE],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "local-" + "a" * 40}, "online"),
        ({"WANDB_API_KEY": "too-short"}, "online"),
        ({"WANDB_API_KEY": "local-" + "a" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "local-" + "a" * 40, "WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_auto_is_what_the_environment_says(
    own_home: Path, tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    assert _effective(tmp_path, **environ) == expected


def test_auto_is_online_for_the_server_that_netrc_knows(own_home: Path, tmp_path: Path) -> None:
    (own_home / ".netrc").write_text(NETRC.format(host="127.0.0.1:9"))
    assert _effective(tmp_path) == "online"
    assert _effective(tmp_path, WANDB_BASE_URL="http://127.0.0.1:10") == "offline"


def test_auto_follows_what_wandb_offline_wrote_down(own_home: Path, tmp_path: Path) -> None:
    settings = own_home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nmode = offline\n")
    assert _effective(tmp_path, WANDB_API_KEY="local-" + "a" * 40) == "offline"
