"""The workspace shows what a run records; it is saved, or one line says why it is not."""

import json
import re

import pytest

from runner.cli.main import main
from tests.process import inspected

pytestmark = pytest.mark.xdist_group("wandb")
GROUP = 'it\'s a=0.1 "x" < y\\n ‖G‖ 🙂'


@pytest.mark.parametrize(
    ("fault", "said"), [("offline", "WANDB_MODE"), ("no key", "login"), (401, ""), ("closed", "")]
)
def test_one_line_says_why_it_is_not_saved(start_server, monkeypatch, capsys, fault, said):
    server = start_server(fault if fault == 401 else None)
    if fault == "offline":
        monkeypatch.setenv("WANDB_MODE", "offline")
    elif fault == "no key":
        monkeypatch.delenv("WANDB_API_KEY")
    elif fault == "closed":
        server.close()
    assert main(["dashboard"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert said in printed.err
    assert "aaaaaa" not in printed.err
    assert server.views == []


def _leaves(config, above=""):
    """Dotted keys; as on a server, what each top-level key holds lies in its ``value``."""
    for key, value in config.items():
        name = f"{above}{key}" if above else f"{key}.value"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield "config", name


def _named(kind, config):
    """Where each metric of a panel is looked for (rows, summary or config), and its name there."""
    where = "rows" if kind == "Run History Line Plot" else "summary"
    yield from ((where, key) for key in config.get("metrics", []))
    for key, place in (("targetKey", "summary"), ("groupBy", "config")):
        yield from ((place, config[name]) for name in (key,) if name in config)
    yield from re.findall(r'"(config|summary):([^"]+)"', json.dumps(config))


def test_the_saved_workspace_shows_what_a_run_records(start_server, outputs, capsys):
    server = start_server()
    for words in (["--group", GROUP], ["--entity", "team", "--name", "λ=1"]):
        assert main(["dashboard", "--project", "clips", *words]) == 0
        printed, entity = capsys.readouterr(), "team" if "team" in words else "local"
        assert printed.err == ""
        assert printed.out.startswith(f"workspace saved: {server.url}/{entity}/clips?nw=")
    for words in ("--grop x", "--project"):
        assert main(["dashboard", *words.split()]) == 2
        assert words.split()[0] in capsys.readouterr().err
    view, other = server.views
    assert (view["entityName"], other["entityName"]) == ("local", "team")
    assert (view["projectName"], other["displayName"]) == ("clips", "λ-1")
    section = json.loads(view["spec"])["section"]
    (runs,) = section["runSets"]
    shown = [(one["key"]["name"], one["op"], one["value"]) for one in runs["filters"]["filters"]]
    assert shown == [("group", "=", GROUP)]
    grouped = [key["name"] for key in runs["grouping"]]  # the seeds of a setting are one group
    assert grouped == ["clip.value.mode", "clip.value.threshold"]

    words = ["clip=norm", "clip.threshold=0.25", "train.max_duration=6ba", "tracker.mode=offline"]
    assert main(["device=cpu", *words]) == 0
    (file,) = outputs.glob("runs/*/wandb/offline-run-*/run-*.wandb")
    records = inspected(file)
    recorded = {("rows", key) for one in records["history"] for key in one["item"]}
    recorded |= {("summary", key) for one in records["summary"] for key in one["update"]}
    for one in records["run"]:
        recorded |= set(_leaves(one["config"]["update"]))
    parts = section["panelBankConfig"]["sections"]
    axes = [section["settings"], *(part["localPanelSettings"] for part in parts)]
    assert {each["xAxis"] for each in axes} == {"train/step"}
    panels = [panel for part in parts for panel in part["panels"]]
    named = {pair for one in panels for pair in _named(one["viewType"], one["config"])}
    assert len(named) > 15
    shown = {tuple(column.split(":", 1)) for column in runs["runFeed"]["columnOrder"]}
    shown |= {(item["key"]["section"], item["key"]["name"]) for item in runs["sort"]["keys"]}
    own = {("run", name) for name in ("displayName", "state", "group", "createdAt")}
    assert own <= shown
    assert named | shown - own <= recorded
