"""The dashboard's command in an environment of its own, and a server that keeps views."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.wandb_server import LoopbackWandb

ROOT = Path(__file__).parents[2]
KEY = "local-" + "a" * 40

Environment = dict[str, str]


def _environment(home: Path) -> Environment:
    """This process's environment with a home of its own and nothing of wandb's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    home.mkdir()
    return kept | {
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "RUNNER_OUTPUTS": str(home.parent / "outputs"),
        "OMP_NUM_THREADS": "1",
        # What goes online by mistake must reach nobody.
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_ERROR_REPORTING": "false",
    }


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return _environment(tmp_path / "home")


@pytest.fixture
def start_server(environment: Environment) -> Iterator[Callable[..., Any]]:
    """Starts servers that take views; the environment then has a key for the last one.

    A server keeps the variables of each view that arrives in `views`.
    """

    class ServerOfViews(LoopbackWandb):
        def __init__(self, *args: Any, **more: Any) -> None:
            self.views: list[dict[str, Any]] = []
            super().__init__(*args, **more)

        def _graphql(self, body: dict[str, Any]) -> dict[str, Any]:
            if "mutation UpsertView2(" not in body["query"]:
                answer: dict[str, Any] = super()._graphql(body)
                return answer
            self.views.append(body["variables"])
            view = {"id": "view-1", "name": body["variables"]["name"]}
            return {"data": {"upsertView": {"view": view, "inserted": True}}}

    servers = []

    def start(fault: int | str | None = None, **more: Any) -> Any:
        server = ServerOfViews(fault, **more)
        servers.append(server)
        environment.update(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
        return server

    yield start
    for server in servers:
        server.close()


# A server that answers may take its time: the machine may be busy.
PATIENT = (
    "import sys; from runner.dashboard import saving; saving.save.__defaults__ = (120.0,); "
    "from runner.cli.main import main; sys.exit(main(['dashboard', *sys.argv[1:]]))"
)


@pytest.fixture
def dashboard(
    environment: Environment, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m runner dashboard` with these words; ``patient`` lifts its time limit."""

    def run(*words: str, patient: bool = False) -> subprocess.CompletedProcess[str]:
        before = ["-c", PATIENT] if patient else ["-m", "runner", "dashboard"]
        return subprocess.run(
            [sys.executable, *before, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=170,
        )

    return run


@pytest.fixture(scope="session")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `.wandb` file of a short run that was recorded offline."""
    base = tmp_path_factory.mktemp("offline")
    environment = _environment(base / "home")
    words = ["clip=norm", "clip.threshold=0.25", "train.max_duration=6ba", "tracker.mode=offline"]
    subprocess.run(
        [sys.executable, "-m", "runner", *words],
        cwd=base,
        env=environment,
        capture_output=True,
        check=True,
        timeout=120,
    )
    (file,) = (base / "outputs" / "runs").glob("*/wandb/offline-run-*/run-*.wandb")
    return file
