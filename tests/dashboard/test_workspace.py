"""The workspace shows what the page shows, and nothing that a run does not record."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runner.dashboard.saving import WorkspaceRequest


class Recorded(NamedTuple):
    """The names that one run left in wandb's record: of its rows, its summary and its config."""

    rows: set[str]
    summary: set[str]
    config: set[str]


@pytest.fixture(scope="module")
def workspace() -> Any:
    """The module that builds workspaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # wandb-workspaces' own, on import
        return importlib.import_module("runner.dashboard.workspace")


@pytest.fixture(scope="module")
def section(workspace: Any) -> dict[str, Any]:
    """What a server would keep of the workspace of one sweep."""
    return _section(workspace, "sweep")


@pytest.fixture(scope="module")
def panels(section: dict[str, Any]) -> list[dict[str, Any]]:
    sections = section["panelBankConfig"]["sections"]
    return [panel for part in sections for panel in part["panels"]]


@pytest.fixture(scope="module")
def recorded(offline_run: Path) -> Recorded:
    """Read by wandb's own command line, from the file that a run left."""
    read = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(offline_run)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = Recorded(set(), set(), set())
    for record in map(json.loads, read.stdout.splitlines()):
        match record["type"]:
            case "history":
                found.rows.update(record["history"]["item"])
            case "summary":
                found.summary.update(record["summary"]["update"])
            case "run":
                found.config.update(_leaves(record["run"]["config"]["update"]))
    return found


def _section(workspace: Any, group: str | None) -> dict[str, Any]:
    built = workspace.build(WorkspaceRequest("team", "clips", "Clipping", group))
    section: dict[str, Any] = json.loads(workspace.specification(built))["spec"]["section"]
    return section


def _leaves(config: dict[str, Any], above: str = "") -> Iterator[str]:
    """Dotted keys; as on a server, what each top-level key holds lies in its `value`."""
    for key, value in config.items():
        name = f"{above}{key}" if above else f"{key}.value"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _named(panel: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where each metric of a panel is looked for (rows, summary or config), and its name there."""
    config = panel["config"]
    match panel["viewType"]:
        case "Run History Line Plot":
            yield from (("rows", key) for key in [config["xAxis"], *config.get("metrics", [])])
        case "Bar Chart":
            yield from (("summary", key) for key in config["metrics"])
        case "Scatter Plot":
            yield from (
                _split(config[axis]) for axis in ("xAxis", "yAxis", "zAxis") if axis in config
            )
        case "Parallel Coordinates Plot":
            yield from (_split(column["accessor"]) for column in config["columns"])
        case "Parameter Importance":
            yield "summary", config["targetKey"]
        case "Run Comparer" | "Markdown Panel":
            assert "metrics" not in config
        case other:
            pytest.fail(f"a kind of panel whose metrics nobody checks: {other}")
    if "groupBy" in config:
        yield "config", config["groupBy"]


def _split(accessor: str) -> tuple[str, str]:
    where, _, name = accessor.partition(":")
    return where, name


@pytest.mark.xdist_group("dashboard_run")  # one run serves both
def test_every_metric_of_every_panel_is_in_the_record_of_a_run(
    panels: list[dict[str, Any]], recorded: Recorded
) -> None:
    named = {pair for panel in panels for pair in _named(panel)}
    assert {pair for pair in named if pair[1] not in getattr(recorded, pair[0])} == set()
    assert len(named) > 15


@pytest.mark.xdist_group("dashboard_run")  # one run serves both
def test_every_column_and_every_order_of_the_runs_is_in_the_record_of_a_run(
    section: dict[str, Any], recorded: Recorded
) -> None:
    (runs,) = section["runSets"]
    columns = {_split(column) for column in runs["runFeed"]["columnOrder"]}
    orders = {(item["key"]["section"], item["key"]["name"]) for item in runs["sort"]["keys"]}
    own = {("run", name) for name in ("displayName", "state", "group", "createdAt")}
    assert own <= columns | orders
    wanted = (columns | orders) - own
    assert {pair for pair in wanted if pair[1] not in getattr(recorded, pair[0])} == set()


@pytest.mark.xdist_group("dashboard_run")  # one run serves both
def test_a_run_is_recorded_once_and_by_what_describes_it(recorded: Recorded) -> None:
    assert not [key for key in recorded.summary if key.startswith("final/")]
    assert {"train/loss", "eval/loss", "best/eval/loss", "grad/norm/p50"} <= recorded.summary
    sections = {name.partition(".")[0] for name in recorded.config}
    assert {"clip", "optimizer", "model", "data", "train", "seed", "recipe"} <= sections
    assert not sections & {"calibrate", "verify", "sweep", "report"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Run History Line Plot", {"metrics": ["train/loss"]}),
        ("Run History Line Plot", {"metrics": ["eval/loss"]}),
        ("Run History Line Plot", {"metrics": ["eval/accuracy"]}),
        ("Run History Line Plot", {"metrics": ["grad/norm", "clip/threshold"], "yLogScale": True}),
        ("Run History Line Plot", {"metrics": ["clip/ratio", "clip/ratio_total"]}),
        ("Run History Line Plot", {"metrics": ["clip/coef"]}),
        (
            "Scatter Plot",
            {
                "xAxis": "config:clip.value.threshold",
                "yAxis": "summary:best/eval/loss",
                "xAxisLogScale": True,
            },
        ),
        ("Scatter Plot", {"yAxis": "summary:best/eval/accuracy", "xAxisLogScale": True}),
        (
            "Scatter Plot",
            {
                "xAxis": "config:optimizer.value.lr",
                "yAxis": "config:clip.value.threshold",
                "zAxis": "summary:best/eval/loss",
            },
        ),
        ("Run History Line Plot", {"metrics": ["clip/fraction"]}),
        ("Run History Line Plot", {"metricRegex": "^clip/what_if/.*$"}),
        ("Run History Line Plot", {"metricRegex": "^grad/norm/.*$", "yLogScale": True}),
        ("Bar Chart", {"metrics": [f"grad/norm/{of}" for of in ("p50", "p90", "p99", "max")]}),
        ("Bar Chart", {"metrics": ["clip/ratio_total"]}),
        ("Parameter Importance", {"targetKey": "best/eval/loss"}),
        ("Run Comparer", {"diffOnly": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_charts_of_the_page_are_there(
    panels: list[dict[str, Any]], kind: str, expected: dict[str, Any]
) -> None:
    configs = [panel["config"] for panel in panels if panel["viewType"] == kind]
    assert any(expected.items() <= config.items() for config in configs)


def test_parallel_coordinates_join_what_was_chosen_to_what_came_of_it(
    panels: list[dict[str, Any]],
) -> None:
    (config,) = [p["config"] for p in panels if p["viewType"] == "Parallel Coordinates Plot"]
    logs = {column["accessor"]: column.get("log", False) for column in config["columns"]}
    chosen = {"config:clip.value.threshold": True, "config:optimizer.value.lr": True}
    others = {"config:accumulation.value.steps": False, "summary:best/eval/loss": False}
    assert (chosen | others).items() <= logs.items()


def test_every_x_axis_counts_optimizer_steps(
    section: dict[str, Any], panels: list[dict[str, Any]]
) -> None:
    axes = [section["settings"]["xAxis"]]
    axes += [part["localPanelSettings"]["xAxis"] for part in section["panelBankConfig"]["sections"]]
    axes += [p["config"]["xAxis"] for p in panels if p["viewType"] == "Run History Line Plot"]
    assert set(axes) == {"train/step"}


TRAINING = {
    "key": {"section": "run", "name": "jobType"},
    "op": "!=",
    "value": "sweep",
    "disabled": False,
}


@pytest.mark.parametrize(
    "group",
    [
        "sweep_norm",
        "clip.threshold=0.1,0.25",
        'it\'s "quoted"',
        "a < b >= c != d",
        "back\\slash\\n",
        "1",
        "x within_last 5 days",
        "‖G‖ über λ 🙂",
    ],
)
def test_only_runs_of_the_group_that_train_are_shown_whatever_its_name(
    workspace: Any, group: str
) -> None:
    (runs,) = _section(workspace, group)["runSets"]
    training, only = runs["filters"]["filters"]
    assert training == TRAINING
    assert only == {
        "key": {"section": "run", "name": "group"},
        "op": "=",
        "value": group,
        "disabled": False,
        "connector": "AND",
    }
    name = workspace.default_name(group)
    built = workspace.build(WorkspaceRequest("team", "clips", name, group))
    assert built.name.startswith("Clipping, ")


def test_all_runs_that_train_are_shown_without_a_group_and_none_are_averaged(
    workspace: Any,
) -> None:
    (runs,) = _section(workspace, None)["runSets"]
    assert runs["filters"]["filters"] == [TRAINING]
    assert runs["grouping"] == []
