"""A wandb server on the loopback interface, and an environment that knows no other."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from wandb_server import LoopbackWandb

    StartServer = Callable[..., LoopbackWandb]


def _server_class() -> type[LoopbackWandb]:
    """The class of the file beside this one; folders of tests are no packages."""
    name = "telemetry_wandb_server"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).parent / "wandb_server.py"
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    found: Any = sys.modules[name]
    server: type[LoopbackWandb] = found.LoopbackWandb
    return server


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def start_server(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServer]:
    """Starts servers; the environment then points to the last one and has a key for it."""
    servers: list[LoopbackWandb] = []

    def start(fault: int | str | None = None, **more: Any) -> LoopbackWandb:
        server = _server_class()(fault, **more)
        servers.append(server)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "local-" + "a" * 40)
        return server

    yield start
    for server in servers:
        server.close()
