"""The workspace shows what a run records; it is saved, or one line says why it is not."""

import json
import re
import subprocess
import sys

import pytest

from runner.cli.main import main
from tests.process import ROOT

pytestmark = pytest.mark.xdist_group("wandb")


@pytest.fixture
def command(own_home, tmp_path, monkeypatch):
    """Runs a module with arguments."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words):
        how = {"cwd": tmp_path, "capture_output": True, "timeout": 170, "text": True}
        return subprocess.run([sys.executable, "-m", *words], **how)

    return run


def _panels(spec):
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [(panel["viewType"], panel["config"]) for part in sections for panel in part["panels"]]


@pytest.mark.parametrize(
    ("fault", "said"), [("offline", "WANDB_MODE"), ("no key", "login"), (401, ""), ("closed", "")]
)
@pytest.mark.usefixtures("command")
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


@pytest.mark.parametrize("words", ["--grop x", "--project"])
def test_a_wrong_request_is_named(capsys, words):
    assert main(["dashboard", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words.split()[0] in printed.err


def _leaves(config, above=""):
    """Dotted keys; as on a server, what each top-level key holds lies in its ``value``."""
    for key, value in config.items():
        name = f"{above}{key}" if above else f"{key}.value"
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield "config", name


def _split(accessor):
    where, _, name = accessor.partition(":")
    return where, name


def _named(kind, config):
    """Where each metric of a panel is looked for (rows, summary or config), and its name there."""
    where = "rows" if kind == "Run History Line Plot" else "summary"
    yield from ((where, key) for key in config.get("metrics", []))
    yield from (("summary", config[key]) for key in ("targetKey",) if key in config)
    yield from (("config", config[key]) for key in ("groupBy",) if key in config)
    for accessor in re.findall(r'"((?:config|summary):[^"]+)"', json.dumps(config)):
        yield _split(accessor)


GROUP = 'it\'s a=0.1 "x" < y\\n ‖G‖ 🙂'


def test_the_saved_workspace_shows_what_a_run_records(start_server, command, tmp_path):
    server = start_server()
    for words in (["--group", GROUP], ["--entity", "team", "--name", "λ=1"]):
        done = command("runner", "dashboard", "--project", "clips", *words)
        assert (done.returncode, done.stderr) == (0, "")
        entity = "team" if "team" in words else "local"
        assert done.stdout.startswith(f"workspace saved: {server.url}/{entity}/clips?nw=")
    view, other = server.views
    assert (view["entityName"], other["entityName"]) == ("local", "team")
    assert (view["projectName"], other["displayName"]) == ("clips", "λ-1")
    section = json.loads(view["spec"])["section"]
    (runs,) = section["runSets"]
    shown = [(one["key"]["name"], one["op"], one["value"]) for one in runs["filters"]["filters"]]
    assert shown == [("jobType", "!=", "sweep"), ("group", "=", GROUP)]

    words = ["clip=norm", "clip.threshold=0.25", "train.max_duration=6ba", "tracker.mode=offline"]
    assert command("runner", *words).returncode == 0
    (file,) = tmp_path.glob("outputs/runs/*/wandb/offline-run-*/run-*.wandb")
    read = command("wandb", "leet", "inspect", "--json", str(file))
    recorded = set()
    for record in map(json.loads, read.stdout.splitlines()):
        recorded |= {("rows", key) for key in record.get("history", {}).get("item", ())}
        recorded |= {("summary", key) for key in record.get("summary", {}).get("update", ())}
        recorded |= set(_leaves(record.get("run", {}).get("config", {}).get("update", {})))
    axes = [section["settings"]["xAxis"]]
    axes += [part["localPanelSettings"]["xAxis"] for part in section["panelBankConfig"]["sections"]]
    assert set(axes) == {"train/step"}
    named = {pair for panel in _panels({"section": section}) for pair in _named(*panel)}
    assert len(named) > 15
    shown = {_split(column) for column in runs["runFeed"]["columnOrder"]}
    shown |= {(item["key"]["section"], item["key"]["name"]) for item in runs["sort"]["keys"]}
    own = {("run", name) for name in ("displayName", "state", "group", "createdAt")}
    assert own <= shown
    assert named | shown - own <= recorded
