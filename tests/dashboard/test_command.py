"""``python -m runner dashboard`` saves the workspace, or writes it to a file and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


def _panels(spec: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [(p["viewType"], p["config"]) for part in sections for p in part["panels"]]


def _written(file: Path) -> dict[str, Any]:
    view: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert len(_panels(view["spec"])) > 10
    return view


def test_without_a_key_the_specification_is_written_and_the_command_says_so(
    dashboard: Run, tmp_path: Path
) -> None:
    done = dashboard("--group", "sweep_norm")
    file = tmp_path / "outputs" / "dashboard.json"
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert str(file) in done.stdout
    assert "wandb login" in done.stdout
    view = _written(file)
    assert (view["project"], view["displayName"]) == ("clip-runner", "Clipping, sweep_norm")


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_server_is_not_asked_where_wandb_is_told_to_be_offline(
    start_server: Callable[..., Any],
    dashboard: Run,
    environment: dict[str, str],
    tmp_path: Path,
    mode: str,
) -> None:
    server = start_server()
    environment["WANDB_MODE"] = mode
    done = dashboard("--output", "here/view.json", "--entity", "team", "--project", "clips")
    assert (done.returncode, done.stderr) == (0, "")
    view = _written(tmp_path / "here" / "view.json")
    assert (view["entity"], view["project"]) == ("team", "clips")
    assert server.requests == []
    assert not (tmp_path / "outputs").exists()


def test_the_real_client_saves_the_workspace_and_all_panels_arrive(
    start_server: Callable[..., Any], dashboard: Run, tmp_path: Path
) -> None:
    server = start_server()
    words = ["--project", "clips", "--group", "a=b", "--name", "Thresholds", "--output", "v.json"]
    done = dashboard(*words, patient=True)
    assert (done.returncode, done.stderr) == (0, "")
    (view,) = server.views
    assert (view["entityName"], view["projectName"]) == ("local", "clips")
    assert (view["displayName"], view["type"]) == ("Thresholds", "project-view")
    spec = json.loads(view["spec"])
    assert _panels(spec) == _panels(_written(tmp_path / "v.json")["spec"])
    filters = spec["section"]["runSets"][0]["filters"]["filters"]
    assert [one["value"] for one in filters] == ["sweep", "a=b"]
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"workspace saved: {server.url}/local/clips?nw=")


def test_a_saved_workspace_leaves_no_file_and_belongs_to_the_entity_that_was_named(
    start_server: Callable[..., Any], dashboard: Run, tmp_path: Path
) -> None:
    server = start_server()
    done = dashboard("--entity", "team", patient=True)
    assert done.returncode == 0
    assert [view["entityName"] for view in server.views] == ["team"]
    assert len(done.stdout.splitlines()) == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("fault", "answered"),
    [(401, 0), (403, 3), ("hang", 3), ("closed", 0)],
    ids=["no such key", "view refused", "hangs at the view", "nobody listens"],
)
@pytest.mark.product(every=2)
def test_a_server_that_fails_leaves_the_file(
    start_server: Callable[..., Any],
    dashboard: Run,
    tmp_path: Path,
    fault: int | str,
    answered: int,
) -> None:
    server = start_server(None if fault == "closed" else fault, answered=answered)
    if fault == "closed":
        server.close()
    done = dashboard()
    file = tmp_path / "outputs" / "dashboard.json"
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 1
    assert "wandb did not take the workspace" in done.stderr
    assert str(file) in done.stderr
    assert "aaaaaa" not in done.stderr + file.read_text()
    _written(file)
    assert server.views == []


def test_without_wandb_workspaces_the_message_names_the_extra(
    environment: dict[str, str], tmp_path: Path
) -> None:
    program = (
        "import sys; sys.modules['wandb_workspaces'] = None\n"
        "from runner.cli.dashboard import main\n"
        "sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "[dashboard]" in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--group", ""], "--group"),
        (["--project", " "], "--project"),
        (["--name", "λ=0.25"], "="),
        (["--output", "."], "--output"),
        (["--output", "/proc/nowhere/view.json"], "/proc/nowhere/view.json"),
        (["--grop", "x"], "--grop"),
    ],
)
def test_a_wrong_word_is_named_and_nothing_is_created(
    dashboard: Run, tmp_path: Path, words: list[str], named: str
) -> None:
    done = dashboard(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
