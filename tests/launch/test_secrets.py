"""Secrets, and values of the environment, are in no file that a command leaves."""

import json
import secrets
from pathlib import Path

import pytest
import yaml

from runner.compose.recorded import recorded
from runner.compose.request import request
from runner.config.identity import differences
from runner.config.problem import RequestError
from tests.process import python

MODEL = [
    *("model._target_=tests.launch.secretive.Secretive", "data.batch_size=32", "device=cpu"),
    *("train.max_duration=3ba", "checkpoint.interval=2ba", "tracker.mode=offline"),
]

RECORDED = {
    "direct": "${oc.env:HF_TOKEN}",
    "plain": "${oc.env:PLAIN_VALUE}",
    "longer": "https://user:${oc.env:PART}@host/x",
    "password": "${oc.env:UNDER_KEY}",
    "indirect": "${model.plain}",
    "twice": "${oc.env:${oc.env:WHICH}}",
    "access_token": "${oc.env:NOT_SET,***}",
    "api_key": "***",
    "copied": "Bearer ***",
    "options": {"credential": "***", "size": 3},
}
"""How the overrides of :class:`Planted` are recorded."""


class Planted:
    """Secrets in the environment and in overrides, and the overrides that use them."""

    def __init__(self):
        self.variables = {
            name: secrets.token_hex(12)
            for name in ("HF_TOKEN", "PLAIN_VALUE", "PART", "UNDER_KEY", "NAMED")
        }
        self.typed, self.default, self.nested = (secrets.token_hex(12) for _ in range(3))
        self.all = [*self.variables.values(), self.typed, self.default, self.nested]
        self.words = [
            "+model.direct='${oc.env:HF_TOKEN}'",
            "+model.plain='${oc.env:PLAIN_VALUE}'",
            "+model.longer='https://user:${oc.env:PART}@host/x'",
            "+model.password='${oc.env:UNDER_KEY}'",
            "+model.indirect='${model.plain}'",
            "+model.twice='${oc.env:${oc.env:WHICH}}'",
            f"+model.access_token='${{oc.env:NOT_SET,{self.default}}}'",
            f"+model.api_key={self.typed}",
            "+model.copied='Bearer ${model.api_key}'",
            f"+model.options={{credential:{self.nested},size:3}}",
            "tracker.tags=['${oc.env:HF_TOKEN}']",
            "hydra.job.env_copy=[PLAIN_VALUE]",
        ]

    def environment(self, others):
        return {**others, **self.variables, "WHICH": "NAMED", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def planted():
    return Planted()


def leaks(planted, folder: Path, *texts: str):
    """Where a planted secret stands: files with their bytes, names, and what was printed."""
    found = [f"printed: {text}" for text in texts if any(one in text for one in planted.all)]
    files = [one for one in folder.rglob("*") if one.is_file()]
    assert files
    for file in files:
        content = file.read_bytes()
        for one in planted.all:
            if one in str(file) or one.encode() in content:
                found.append(f"{file}: {one}")
    return found


def run(environment, *words, code=0):
    """What a command leaves and prints."""
    done = python("-m", "runner", *words, env=environment, code=code)
    return Path(environment["RUNNER_OUTPUTS"]), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("plugin", "fails"),
    [
        (["plugin=single"], False),
        (["plugin=ddp", "plugin.nproc=2"], True),
        pytest.param(["plugin=single"], True, marks=pytest.mark.slow),
        pytest.param(["plugin=ddp", "plugin.nproc=2"], False, marks=pytest.mark.slow),
    ],
)
def test_a_run_leaves_no_secret(environment, planted, plugin, fails):
    words = [*MODEL, *plugin, *planted.words, f"+model.fails={str(fails).lower()}"]
    outputs, printed = run(planted.environment(environment), *words, code=int(fails))
    assert leaks(planted, outputs, printed) == []
    (folder,) = (outputs / "runs").iterdir()
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    log = (folder / "runner.log").read_text()
    assert "loaded with {'direct': '${oc.env:HF_TOKEN}', 'plain': '${oc.env:PLAIN_VALUE}'" in log
    recorded = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert recorded.items() >= RECORDED.items()
    overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    assert {"+model.api_key=***", "+model.options=***"} <= set(overrides)
    if fails:
        error = json.loads((folder / "status.json").read_text())["error"]
        assert "access denied: {'direct': '${oc.env:HF_TOKEN}'" in error
    else:
        manifest = json.loads((folder / "checkpoints" / "final" / "manifest.json").read_text())
        assert manifest["config"]["model"] == recorded
        assert (folder / "checkpoints" / "step_000000002" / "state.pt").is_file()


def test_a_sweep_leaves_no_secret(environment, planted):
    words = ["-m", *MODEL, *planted.words, "seed=0,1", "clip.threshold='${oc.decode:${oc.env:C}}'"]
    words += ["+model.fails='${oc.decode:${oc.env:FAILS,true}}'"]
    sees = planted.environment(environment) | {"C": "0.5"}
    outputs, printed = run(sees, *words, code=1)
    assert leaks(planted, outputs, printed) == []
    (sweep,) = (outputs / "sweeps").iterdir()
    entries = json.loads((sweep / "sweep.json").read_text())["runs"]
    assert [one["state"] for one in entries] == ["failed", "failed"]
    assert all("+model.api_key=***" in one["words"] for one in entries)
    page = (sweep / "report.html").read_text()
    assert "access denied" in page
    assert "cannot be read" not in page


@pytest.mark.slow
def test_a_sweep_continues_with_its_secrets(environment, planted):
    words = ["-m", *MODEL, *planted.words, "seed=0,1", "tracker=none"]
    words += ["+model.fails_once='${oc.env:FLAG}'"]
    sees = planted.environment(environment) | {"FLAG": str(Path(environment["HOME"]) / "flag")}
    outputs, _ = run(sees, *words, code=1)
    (sweep,) = (outputs / "sweeps").iterdir()
    run(sees, *words)
    entries = json.loads((sweep / "sweep.json").read_text())["runs"]
    assert [one["state"] for one in entries] == ["finished", "finished"]
    assert leaks(planted, outputs) == []


@pytest.mark.slow
def test_values_are_read_anew_for_an_evaluation(environment, planted, monkeypatch):
    sees = planted.environment(environment) | {"CHANNELS": "3"}
    words = [*MODEL, "tracker=none", "+model.direct='${oc.env:HF_TOKEN}'"]
    words += [f"+model.api_key={planted.typed}", "+model.n='${oc.decode:${oc.env:CHANNELS}}'"]
    outputs, _ = run(sees, *words)
    (folder,) = (outputs / "runs").iterdir()
    monkeypatch.setenv("HF_TOKEN", "another one")
    monkeypatch.delenv("CHANNELS", raising=False)
    with pytest.raises(RequestError, match=r"model\.n=.*'CHANNELS' not found"):
        recorded(folder / "config.yaml", ["model.api_key=again"])
    monkeypatch.setenv("CHANNELS", "4")
    with pytest.raises(RequestError, match=r"model\.api_key  is a secret, .*: give it again"):
        recorded(folder / "config.yaml", [])
    arguments = recorded(folder / "config.yaml", ["model.api_key=again"]).config.model.arguments
    assert arguments["direct"] == "another one"
    assert arguments["n"] == 4
    _, printed = run(sees, "evaluate", str(folder), f"model.api_key={planted.typed}")
    assert "eval/loss" in printed
    run(sees, "export", str(folder))
    assert leaks(planted, outputs) == []


def test_another_secret_is_the_same_configuration(outputs, monkeypatch):
    words = ["+model.direct='${oc.env:HF_TOKEN}'", "+model.password='${oc.env:ANY}'"]

    def composed(token, secret, typed):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setenv("ANY", secret)
        [job] = request([*words, f"+model.api_key={typed}"]).jobs
        return job

    one, other = composed("first one", "second", "third"), composed("fourth one", "5", "sixth")
    assert one.hash == other.hash
    assert differences(one.plain, other.plain) == {}
    assert one.config.model.arguments != other.config.model.arguments


def test_another_value_of_the_environment_is_another_configuration(outputs, monkeypatch):
    def composed(rate):
        monkeypatch.setenv("RATE", rate)
        [job] = request(["optimizer.lr='${oc.decode:${oc.env:RATE}}'"]).jobs
        return job

    one, other = composed("0.1"), composed("0.2")
    assert one.plain["optimizer"]["lr"] == other.plain["optimizer"]["lr"]
    assert one.config.optimizer.arguments["lr"] == 0.1
    assert one.hash != other.hash
    assert list(differences(one.plain, other.plain)) == ["environment.optimizer.lr"]
    assert one.hash == composed("0.1").hash


def test_a_configuration_without_secrets_has_its_values(outputs):
    [job] = request(["model.width='${seed}'", "seed=7", "+model.pad_token=end"]).jobs
    assert job.plain["model"]["width"] == 7
    assert job.plain["model"]["pad_token"] == "end"
    assert "environment" not in job.plain


@pytest.mark.parametrize("command", ["verify", "calibrate"])
@pytest.mark.slow
def test_a_comparison_or_a_calibration_leaves_no_secret(environment, planted, command):
    words = [*planted.words, "model._target_=tests.launch.secretive.Secretive", "device=cpu"]
    words += ["data.batch_size=16", "verify.steps=1", "calibrate.steps=2"]
    outputs, _ = run(planted.environment(environment), command, *words)
    (file,) = outputs.glob(f"*/*/{command}.json")
    assert leaks(planted, outputs) == []
    assert "+model.api_key=***" in json.loads(file.read_text())["words"]
