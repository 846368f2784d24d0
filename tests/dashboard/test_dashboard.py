"""The workspace shows what a run records; it is saved, or written to a file that is named."""

import importlib
import json
import re
import subprocess
import sys
import warnings

import pytest

from runner.dashboard.saving import WorkspaceRequest
from tests.process import ROOT

pytestmark = pytest.mark.xdist_group("wandb")


PATIENT = (
    "import sys; from runner.dashboard import saving; saving.save.__defaults__ = (120.0,); "
    "from runner.cli.main import main; sys.exit(main(['dashboard', *sys.argv[1:]]))"
)


@pytest.fixture
def dashboard(own_home, tmp_path, monkeypatch):
    """Runs ``python -m runner dashboard``, or a program with the same arguments."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words, program="", command=("runner", "dashboard")):
        before = ["-c", program] if program else ["-m", *command]
        how = {"cwd": tmp_path, "capture_output": True, "timeout": 170}
        return subprocess.run([sys.executable, *before, *words], text=True, **how)

    return run


def _panels(spec):
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [(panel["viewType"], panel["config"]) for part in sections for panel in part["panels"]]


def _written(file):
    view = json.loads(file.read_text(encoding="utf-8"))
    assert len(_panels(view["spec"])) > 10
    return view


@pytest.mark.parametrize("mode", [None, "offline"])
def test_offline_the_specification_is_written(start_server, dashboard, tmp_path, monkeypatch, mode):
    server, words = start_server(), ["--group", "sweep_norm"]
    if mode is None:
        monkeypatch.delenv("WANDB_API_KEY")
    else:
        monkeypatch.setenv("WANDB_MODE", mode)
        words += ["--output", "here/view.json", "--entity", "team", "--project", "clips"]
    done = dashboard(*words)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert mode is not None or "wandb login" in done.stdout
    view = _written(tmp_path / ("here/view.json" if mode else "outputs/dashboard.json"))
    assert view["project"] == ("clips" if mode else "clip-runner")
    assert view["displayName"] == "Clipping, sweep_norm"
    assert (server.requests, (tmp_path / "outputs").exists()) == ([], mode is None)


def test_the_real_client_saves_the_workspace_with_all_panels(start_server, dashboard, tmp_path):
    server = start_server()
    words = ["--project", "clips", "--group", "a=b", "--name", "Thresholds"]
    for more in (["--output", "v.json"], ["--entity", "team"]):
        done = dashboard(*words, *more, program=PATIENT)
        assert (done.returncode, done.stderr) == (0, "")
        entity = "team" if "team" in more else "local"
        first, *rest = done.stdout.splitlines()
        assert first.startswith(f"workspace saved: {server.url}/{entity}/clips?nw=")
        assert len(rest) == ("v.json" in more)  # without --output no file is written
    assert [view["entityName"] for view in server.views] == ["local", "team"]
    view = server.views[0]
    assert (view["projectName"], view["displayName"]) == ("clips", "Thresholds")
    assert view["type"] == "project-view"
    spec = json.loads(view["spec"])
    assert _panels(spec) == _panels(_written(tmp_path / "v.json")["spec"])
    filters = spec["section"]["runSets"][0]["filters"]["filters"]
    assert [one["value"] for one in filters] == ["sweep", "a=b"]
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(("fault", "answered"), [(401, 0), ("hang", 3), ("closed", 0)])
def test_a_server_that_fails_leaves_the_file(start_server, dashboard, tmp_path, fault, answered):
    server = start_server(None if fault == "closed" else fault, answered=answered)
    if fault == "closed":
        server.close()
    done = dashboard()
    file = tmp_path / "outputs" / "dashboard.json"
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (0, "", 1)
    assert str(file) in done.stderr
    assert "aaaaaa" not in done.stderr + file.read_text()
    assert _written(file)
    assert server.views == []


WITHOUT = (
    "import sys; sys.modules['wandb_workspaces'] = None\n"
    "from runner.cli.dashboard import main\n"
    "sys.exit(main([]))"
)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--group", ""], "--group"),
        (["--name", "λ=0.25"], "="),
        (["--output", "."], "--output"),
        (["--grop", "x"], "--grop"),
        ([], "[dashboard]"),  # without the package
    ],
)
def test_a_wrong_request_is_named_and_nothing_is_created(dashboard, tmp_path, words, named):
    done = dashboard(*words, program="" if words else WITHOUT)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


@pytest.fixture(scope="module")
def workspace():
    """The module that builds workspaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # wandb-workspaces' own, on import
        return importlib.import_module("runner.dashboard.workspace")


def _section(workspace, group):
    built = workspace.build(WorkspaceRequest("team", "clips", "Clipping", group))
    return json.loads(workspace.specification(built))["spec"]["section"]


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


def test_all_that_panels_show_is_in_the_record_of_a_run(workspace, dashboard, tmp_path):
    words = ["clip=norm", "clip.threshold=0.25", "train.max_duration=6ba", "tracker.mode=offline"]
    assert dashboard(*words, command=("runner",)).returncode == 0
    (file,) = tmp_path.glob("outputs/runs/*/wandb/offline-run-*/run-*.wandb")
    read = dashboard("leet", "inspect", "--json", str(file), command=("wandb",))
    recorded = set()
    for record in map(json.loads, read.stdout.splitlines()):
        recorded |= {("rows", key) for key in record.get("history", {}).get("item", ())}
        recorded |= {("summary", key) for key in record.get("summary", {}).get("update", ())}
        recorded |= set(_leaves(record.get("run", {}).get("config", {}).get("update", {})))
    section = _section(workspace, "sweep")
    axes = [section["settings"]["xAxis"]]
    axes += [part["localPanelSettings"]["xAxis"] for part in section["panelBankConfig"]["sections"]]
    assert set(axes) == {"train/step"}
    named = {pair for panel in _panels({"section": section}) for pair in _named(*panel)}
    assert len(named) > 15
    (runs,) = section["runSets"]
    shown = {_split(column) for column in runs["runFeed"]["columnOrder"]}
    shown |= {(item["key"]["section"], item["key"]["name"]) for item in runs["sort"]["keys"]}
    own = {("run", name) for name in ("displayName", "state", "group", "createdAt")}
    assert own <= shown
    assert named | shown - own <= recorded
    # A run is recorded once, and by what describes it.
    assert not [key for _, key in recorded if key.startswith("final/")]


@pytest.mark.parametrize("group", [None, "a=0.1,b", 'it\'s "x" < y', "back\\slash\\n ‖G‖ 🙂"])
def test_only_runs_of_the_group_that_train_are_shown_whatever_its_name(workspace, group):
    (runs,) = _section(workspace, group)["runSets"]
    shown = [(one["key"]["name"], one["op"], one["value"]) for one in runs["filters"]["filters"]]
    assert shown == [("jobType", "!=", "sweep"), ("group", "=", group)][: 1 if group is None else 2]
    assert runs["grouping"] == []  # none are averaged
