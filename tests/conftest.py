"""What all tests share: one thread, folders of their own, and which cases of a product are slow."""

import gc
import os
import signal
import sys
from collections import Counter

import pytest

from tests.process import environment_at

# Hundreds of thousands of objects are imported: a search among them for garbage takes a second.
gc.disable()
# Tests and their ranks run beside one another: more threads than cores would slow all of them.
# Read when torch is imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# What one process compiled, others need not compile again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell starts background jobs with SIGINT ignored, and the processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow all cases of a long product that the gate leaves out."""
    cases = Counter()
    for item in items:
        if marker := item.get_closest_marker("product"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % marker.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1


def pytest_collection_finish():
    """Search for garbage again, but not in what was imported."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Print the ten slowest files, and the sum over all tests."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("slowest files")
    for file, time in seconds.most_common(10):
        terminalreporter.write_line(f"{time:7.1f} s  {file}")
    terminalreporter.write_line(f"{seconds.total():7.1f} s  all files, added up over the workers")


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """The folder for outputs of a command that is called in this process, as its only rank."""
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path / "outputs"))
    # A run makes its process keep freed memory, and this one runs many other tests.
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**17))
    for name in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "outputs"


@pytest.fixture
def environment(tmp_path):
    """Environment of a command whose runs go to a folder of their own."""
    return environment_at(tmp_path)


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
    yield home
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # the next test has another home and another server


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
