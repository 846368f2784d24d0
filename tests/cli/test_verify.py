"""``python -m runner verify`` from its words to its last line, its file and its exit code."""

import json

import pytest

from runner.booster.plugin import PLUGINS
from runner.cli.main import main
from runner.cli.measure import FILE
from tests.process import python
from tests.verify.requests import IMAGES, TOKENS, SeesReplicasThatAreNotThere, net


def written(outputs):
    [file] = outputs.glob(f"verifications/*/{FILE}")
    return json.loads(file.read_text())


def test_local_ranks_are_one_process(outputs, capsys):
    words = [*TOKENS, "plugin=pipeline", "plugin.pp_size=2", "clip=adaptive", "seed=3"]
    assert main(["verify", *words]) == 0
    said = capsys.readouterr().out
    report = written(outputs)
    last = said.splitlines()[-1]
    assert last.startswith(f"verify: ok max_rel_error={report['max_rel_error']:.2g} naive=")
    assert (report["ok"], report["error"]) == (True, None)
    assert report["max_rel_error"] < 1e-12
    assert (report["request"]["plugin"]["pp_size"], report["request"]["seed"]) == (2, 3)
    assert "torch " in report["versions"]
    assert report["words"][-1] == "seed=3"
    [mode] = report["modes"]
    assert mode["mode"] == "adaptive"
    for step in mode["steps"]:
        assert f"{step['reference']['norm']:.15g}" in said
    assert not (outputs / "runs").exists()


@pytest.mark.slow
def test_ranks_that_torchrun_started_are_one_process(outputs):
    before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "runner", "verify", *TOKENS, "plugin=fsdp"]
    assert "verify: ok max_rel_error=" in python(*before, *words).stdout
    assert written(outputs)["ok"]


def test_a_wrong_layout_fails_with_its_worst_parameters_named(outputs, capsys, monkeypatch):
    monkeypatch.setitem(PLUGINS, "ddp", SeesReplicasThatAreNotThere)
    words = [*TOKENS, "plugin=ddp", "plugin.nproc=1", "clip=norm", "clip.threshold=0.1"]
    words.append("accumulation=x2")
    assert main(["verify", *words]) == 1
    out = capsys.readouterr().out
    report = written(outputs)
    last = f"verify: FAILED max_rel_error={report['max_rel_error']:.2g} naive=none"
    assert out.splitlines()[-1] == last
    assert "‖G‖ of step 1 is off by 0.29" in out
    assert "furthest off:" in out
    [mode] = report["modes"]
    assert len(mode["worst"]) == 5
    for parameter in mode["worst"]:
        assert f"{parameter['name']:<5}" in out


@pytest.mark.parametrize(
    ("model", "parts", "absent"),
    [
        ("Single", ["verify.dtype=float32"], []),  # of float32 alone
        (
            "Broken",
            ["NonFiniteGradient: step 1: the gradient's norm is nan: weight", "every step"],
            ["clip.nonfinite=skip"],
        ),
    ],
)
def test_a_model_that_cannot_be_compared_gets_its_hint(model, parts, absent, outputs, capsys):
    words = ["verify", *IMAGES, *net(model), "accumulation=x2"]
    assert main(words) == 1
    said = capsys.readouterr()
    assert said.out.endswith("verify: FAILED\n")
    assert all(part in said.err for part in parts)
    assert not [part for part in absent if part in said.err]
    if model == "Single":
        assert main([*words, "verify.dtype=float32"]) == 0


def test_its_folder_is_the_one_that_is_given(outputs, tmp_path, capsys):
    words = [*IMAGES, "clip.mode=none", "clip.threshold=null", "accumulation=x2"]
    words.append(f"hydra.run.dir={tmp_path}/${{clip.mode}}")
    assert main(["verify", *words]) == 0
    assert (tmp_path / "none" / FILE).exists()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "verify: ok max_rel_error=0 naive=none"
    assert not outputs.exists()


def test_an_earlier_verification_is_not_written_over(tmp_path, capsys):
    (tmp_path / FILE).write_text("{}")
    assert main(["verify", *IMAGES, "accumulation=x2", f"hydra.run.dir={tmp_path}"]) == 2
    assert "holds an earlier verification" in capsys.readouterr().err
    assert (tmp_path / FILE).read_text() == "{}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plugin=single  nothing is compared in one process: choose plugin=ddp plugin.nproc=2"),
        (["plugin=ddp"], "nothing is compared on one rank: start more, plugin.nproc=2"),
    ],
)
def test_one_process_is_not_compared_with_itself(words, message, outputs, capsys):
    assert main(["verify", *IMAGES, *words]) == 2
    assert message in capsys.readouterr().err
    assert not outputs.exists()
