"""Secrets, and values of the environment, are in no file that a command leaves."""

from pathlib import Path

import pytest
import yaml

from runner.compose.recorded import recorded
from runner.compose.request import request
from runner.config.identity import differences
from runner.config.problem import RequestError
from tests.launch.ends import read
from tests.launch.secretive import RECORDED, Planted
from tests.process import python

pytestmark = pytest.mark.xdist_group("finished")
SMALL = ["device=cpu", "data.batch_size=32", "train.max_duration=3ba", "tracker.mode=offline"]


def leaks(planted, folder: Path, *texts: str):
    """Where a planted secret stands."""
    found = [text for text in texts if any(one in text for one in planted.all)]
    for file in folder.rglob("*"):
        content = str(file).encode() + (file.read_bytes() if file.is_file() else b"")
        found += [file for one in planted.all if one.encode() in content]
    return found


def test_a_run_leaves_no_secret(single):
    folder = single.folder
    assert leaks(single.planted, folder, single.printed) == []
    log = (folder / "runner.log").read_text()
    assert "loaded with {'direct': '${oc.env:HF_TOKEN}', 'plain': '${oc.env:PLAIN_VALUE}'" in log
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model.items() >= RECORDED.items()
    overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    assert {"+model.api_key=***", "+model.options=***"} <= set(overrides)
    assert read(folder / "checkpoints" / "final", "manifest.json")["config"]["model"] == model


def test_ranks_and_a_sweep_that_fail_leave_no_secret(environment):
    planted = Planted()
    words = [*SMALL, *planted.words, "+model.fails='${oc.decode:${oc.env:FAILS}}'"]
    sees = environment | planted.variables | {"FAILS": "true"}
    words += ["plugin=ddp", "plugin.nproc=2"]
    done = python("-m", "runner", "-m", "clip.threshold=1,2", *words, env=sees, code=1)
    outputs = Path(environment["RUNNER_OUTPUTS"])
    assert leaks(planted, outputs, done.stdout, done.stderr) == []
    (sweep,) = (outputs / "sweeps").iterdir()
    for entry in read(sweep, "sweep.json")["runs"]:
        assert entry["state"] == "failed"
        assert "+model.api_key=***" in entry["words"]
        error = read(sweep / entry["folder"])["error"]
        assert "access denied: {'direct': '${oc.env:HF_TOKEN}'" in error
    assert "access denied" in (sweep / "report.html").read_text()


def test_values_are_read_anew_for_an_evaluation(single, monkeypatch):
    for name, value in single.planted.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", "another one")
    given = [f"model.{name}=again" for name in ("api_key", "access_token", "copied", "options")]
    config = single.folder / "config.yaml"
    assert recorded(config, given).config.model.arguments["direct"] == "another one"
    with pytest.raises(RequestError, match=r"model\.api_key  is a secret, .*: give it again"):
        recorded(config, given[1:])
    monkeypatch.delenv("PLAIN_VALUE")
    with pytest.raises(RequestError, match=r"model\.plain=.*'PLAIN_VALUE' not found"):
        recorded(config, given)


def test_a_secret_is_no_part_of_a_configuration_but_another_value_is(outputs, monkeypatch):
    words = ["+model.direct='${oc.env:HF_TOKEN}'", "optimizer.lr='${oc.decode:${oc.env:RATE}}'"]

    def composed(token, typed, rate):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setenv("RATE", rate)
        [job] = request([*words, f"+model.api_key={typed}"]).jobs
        return job

    one, other = composed("first one", "third", "0.1"), composed("fourth one", "sixth", "0.1")
    assert one.hash == other.hash
    assert differences(one.plain, other.plain) == {}
    assert one.config.model.arguments != other.config.model.arguments
    rate = composed("first one", "third", "0.2")
    assert one.plain["optimizer"]["lr"] == rate.plain["optimizer"]["lr"]
    assert (one.config.optimizer.arguments["lr"], one.hash != rate.hash) == (0.1, True)
    assert list(differences(one.plain, rate.plain)) == ["environment.optimizer.lr"]
    [job] = request(["+model.pad_token=end"]).jobs  # of text
    assert job.plain["model"]["pad_token"] == "end"
