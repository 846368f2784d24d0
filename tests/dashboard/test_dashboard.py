"""The workspace shows what a run records; it is saved, or one line says why it is not."""

import json
import re

import pytest

from runner.cli.main import main
from tests.process import inspected
from tests.telemetry.wandb_server import LoopbackWandb

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


def test_a_workspace_is_saved_where_it_is_asked_for(start_server, capsys):
    server = start_server()
    for words, entity in (([], "local"), (["--entity", "team", "--name", "λ=1"], "team")):
        assert main(["dashboard", "--project", "clips", *words]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert printed.out.startswith(f"workspace saved: {server.url}/{entity}/clips?nw=")
    first, second = server.views
    assert (first["entityName"], second["entityName"]) == ("local", "team")
    assert (first["projectName"], second["displayName"]) == ("clips", "λ-1")


@pytest.mark.parametrize("words", ["--grop x", "--project"])
def test_a_wrong_flag_is_named(start_server, capsys, words):
    server = start_server()
    assert main(["dashboard", *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err
    assert server.views == []


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    """The saved workspace of runs of a group."""
    server = LoopbackWandb()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("WANDB_BASE_URL", server.url)
        patch.setenv("WANDB_API_KEY", "local-" + "a" * 40)
        for key in ("WANDB_MODE", "WANDB_ENTITY", "NETRC"):
            patch.delenv(key, raising=False)
        code = main(["dashboard", "--project", "clips", "--group", GROUP])
    server.close()
    assert code == 0
    [view] = server.views
    return json.loads(view["spec"])["section"]


def test_a_workspace_of_a_group_shows_its_settings(section):
    [runs] = section["runSets"]
    filters = runs["filters"]["filters"]
    shown = [(rule["key"]["name"], rule["op"], rule["value"]) for rule in filters]
    assert shown == [("group", "=", GROUP)]
    grouped = [key["name"] for key in runs["grouping"]]  # the seeds of a setting are one group
    assert grouped == ["clip.value.mode", "clip.value.threshold"]


def test_the_saved_workspace_shows_what_a_run_records(section, own_home, outputs):
    [runs] = section["runSets"]
    words = ["clip=norm", "clip.threshold=0.25", "train.max_duration=6ba", "tracker.mode=offline"]
    assert main(["device=cpu", *words]) == 0
    (file,) = outputs.glob("runs/*/wandb/offline-run-*/run-*.wandb")
    records = inspected(file)
    recorded = {("rows", key) for row in records["history"] for key in row["item"]}
    recorded |= {("summary", key) for part in records["summary"] for key in part["update"]}
    for run in records["run"]:
        recorded |= set(_leaves(run["config"]["update"]))
    parts = section["panelBankConfig"]["sections"]
    axes = [section["settings"], *(part["localPanelSettings"] for part in parts)]
    assert {settings["xAxis"] for settings in axes} == {"train/step"}
    panels = [panel for part in parts for panel in part["panels"]]
    named = {pair for panel in panels for pair in _named(panel["viewType"], panel["config"])}
    assert len(named) > 15
    shown = {tuple(column.split(":", 1)) for column in runs["runFeed"]["columnOrder"]}
    shown |= {(item["key"]["section"], item["key"]["name"]) for item in runs["sort"]["keys"]}
    keys = {("run", name) for name in ("displayName", "state", "group", "createdAt")}
    assert keys <= shown
    assert named | shown - keys <= recorded
