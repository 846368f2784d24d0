"""What all tests share: one thread, folders of their own, and a daily sample of long products."""

import math
import os
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Tests and their ranks run beside one another: more threads than cores would slow all of them.
# Read when torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

SEED = "RUNNER_TESTS_SEED"
ONE_IN = 16
"""Share of a file's tests marked ``sampled`` that run; ``sampled(one_in=10)`` has another."""


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="all cases of tests marked sampled")


def pytest_configure(config):
    # The workers of pytest-xdist get it with the environment, also when the day ends meanwhile.
    os.environ.setdefault(SEED, datetime.now(UTC).date().isoformat())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("whole"):
        return
    cases = {}
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            key = item.nodeid.partition("::")[0], marker.kwargs.get("one_in", ONE_IN)
            cases.setdefault(key, []).append(item)
    left_out = set()
    for (file, one_in), found in cases.items():
        number = math.ceil(len(found) / one_in)
        chosen = random.Random(os.environ[SEED] + file).sample(found, number)
        left_out |= set(found) - set(chosen)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("whole"):
        terminalreporter.write_line(
            f"of tests marked sampled a part ran, chosen by {SEED}={os.environ[SEED]} "
            "(--whole runs all)"
        )


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """The folder for outputs of a command that is called in this process, as its only rank."""
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path / "outputs"))
    for name in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "outputs"


@pytest.fixture
def environment(tmp_path):
    """Environment of a command whose runs go to a folder of their own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "RUNNER_"))}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "RUNNER_OUTPUTS": str(tmp_path / "outputs"),
        "HOME": str(tmp_path),
        "WANDB_ERROR_REPORTING": "false",
    }


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """A home of the test's own, and nothing of wandb's in the environment."""
    home = tmp_path / "home"
    home.mkdir()
    for key in [*os.environ]:
        if key.startswith("WANDB_") or key == "NETRC":
            monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(home))
    # A run that goes online by mistake must reach nobody.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    return home


@pytest.fixture
def start_server(own_home, monkeypatch):
    """Starts servers of wandb; the environment then points to the last one and has a key for it."""
    from tests.telemetry.wandb_server import LoopbackWandb

    servers = []

    def start(fault=None, **more):
        server = LoopbackWandb(fault, **more)
        servers.append(server)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "local-" + "a" * 40)
        return server

    yield start
    for server in servers:
        server.close()
