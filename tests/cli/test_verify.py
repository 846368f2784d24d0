"""``python -m runner verify`` from its words to its last line, its file and its exit code."""

import json
import os

import pytest

from runner.cli.main import main
from runner.cli.verify import FILE, checked
from runner.config.problem import RequestError
from runner.verify.table import exception_only
from tests.process import python
from tests.verify import faulty_plugins
from tests.verify.requests import IMAGES, TOKENS, net

STACK = "Traceback (most recent call last):\n  File x\n    y\n"


def written(outputs):
    [file] = outputs.glob(f"verifications/*/{FILE}")
    return json.loads(file.read_text())


def test_local_ranks_are_one_process(outputs):
    words = [*TOKENS, "plugin=pipeline", "plugin.pp_size=2", "clip=adaptive", "seed=3"]
    said = python("-m", "runner", "verify", *words).stdout
    found = written(outputs)
    last = said.splitlines()[-1]
    assert last.startswith("verify: ok max_rel_error=")
    assert f"max_rel_error={found['max_rel_error']:.2g} naive=" in last
    assert (found["ok"], found["error"]) == (True, None)
    assert found["max_rel_error"] < 1e-12
    assert found["request"]["plugin"]["pp_size"] == 2
    assert found["request"]["seed"] == 3
    assert "torch " in found["versions"]
    assert found["words"][-1] == "seed=3"
    [mode] = found["modes"]
    assert mode["mode"] == "adaptive"
    for step in mode["steps"]:
        assert f"{step['reference']['norm']:.15g}" in said
    assert not (outputs / "runs").exists()


def test_ranks_that_torchrun_started_are_one_process(outputs):
    before = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "runner", "verify", *TOKENS, "plugin=fsdp", "verify.steps=1"]
    assert "verify: ok max_rel_error=" in python(*before, *words).stdout
    assert written(outputs)["ok"]


def test_one_process_is_itself(outputs, capsys):
    assert main(["verify", *IMAGES, "plugin=single", "clip=none"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "verify: ok max_rel_error=0 naive=none"


def test_a_wrong_layout_ends_with_the_worst_parameters_and_exit_code_1(
    outputs, capsys, monkeypatch
):
    faulty = faulty_plugins.SeesReplicasThatAreNotThere
    monkeypatch.setattr("runner.booster.plugin.ddp.PLUGIN", faulty)
    words = [*TOKENS, "plugin=ddp", "plugin.nproc=1", "clip=norm", "clip.threshold=0.1"]
    assert main(["verify", *words]) == 1
    out = capsys.readouterr().out
    found = written(outputs)
    assert out.splitlines()[-1] == (
        f"verify: FAILED max_rel_error={found['max_rel_error']:.2g} naive=none"
    )
    assert "‖G‖ of step 1 is off by 0.29" in out
    assert "furthest off:" in out
    [mode] = found["modes"]
    assert len(mode["worst"]) == 5
    for one in mode["worst"]:
        assert f"{one['name']:<5}" in out
        assert one["placed"] == "whole on 2 ranks"


def test_its_exit_code_is_that_of_the_comparison_though_nobody_reads_on(outputs, monkeypatch):
    faulty = faulty_plugins.SeesReplicasThatAreNotThere
    monkeypatch.setattr("runner.booster.plugin.ddp.PLUGIN", faulty)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(["verify", *TOKENS, "plugin=ddp", "plugin.nproc=1"]) == 1
    found = written(outputs)
    assert (found["ok"], found["error"]) == (False, None)


def test_a_layout_that_does_not_add_up_ends_with_exit_code_1(outputs, capsys, monkeypatch):
    monkeypatch.setattr("runner.booster.plugin.ddp.PLUGIN", faulty_plugins.ChecksItsLayout)
    assert main(["verify", *TOKENS, "plugin=ddp", "plugin.nproc=1"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "verify: FAILED"
    assert "rank 0: runner.clip.shard.LayoutError: " in out
    assert "Traceback" not in out
    found = written(outputs)
    assert not found["ok"]
    assert found["rank"] == 0
    assert "LayoutError" in found["error"]
    assert found["request"]["plugin"]["name"] == "ddp"


def test_a_model_of_float32_alone_gets_a_hint(outputs, capsys):
    assert main(["verify", *IMAGES, *net("Single")]) == 1
    assert "verify.dtype=float32" in capsys.readouterr().out
    assert main(["verify", *IMAGES, *net("Single"), "verify.dtype=float32"]) == 0


def test_a_word_in_the_traceback_alone_gives_no_hint(outputs, capsys):
    assert main(["verify", *IMAGES, *net("Fails")]) == 1
    assert "dtype = " in written(outputs)["error"]
    assert "verify.dtype=float32" not in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_is_not_left_out(outputs, capsys):
    assert main(["verify", *IMAGES, *net("Broken")]) == 1
    out = capsys.readouterr().out
    assert "NonFiniteGradient: step 1: the gradient's norm is nan: weight, from" in out
    assert "compares every step" in out
    assert "clip.nonfinite=skip" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clip.treshold=1"], "did you mean clip.threshold?"),
        (["verify.modes=[norm,adaptve]"], "adaptve"),
        (["verify.steps=0"], "must be an integer of at least 1"),
        (["-m", "seed=1,2"], "--multirun  does not go with a verification"),
        (["recipe=sweep_norm"], "a verification is of one run"),
        (["plugin=hybrid", "plugin.tp_size=3", "plugin.dp_size=1", "plugin.nproc=2"], "plugin."),
        (["model=gpt", "data=digits"], "does not take a sample"),
    ],
)
def test_a_wrong_request_creates_nothing(words, said, outputs, capsys):
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
    assert not outputs.exists()


def test_text_stands_in_for_data_that_was_left_open_and_does_not_fit():
    wanted, also = checked(["model=gpt", "device=cpu"])
    assert also == ["data=text"]
    assert wanted.jobs[0].config.data.target == "runner.data.text.text"
    assert checked(["device=cpu"])[1] == []
    with pytest.raises(RequestError) as error:
        checked(["model=gpt", "device=cpu", "plugin=tensor", "plugin.tp_size=3"])
    assert [problem.key for problem in error.value.problems] == ["plugin.tp_size"]
    with pytest.raises(RequestError, match=r"does not take a sample of .*digits"):
        checked(["model=resnet18", "device=cpu"])


def test_its_folder_is_the_one_that_is_given_and_is_not_written_twice(outputs, tmp_path, capsys):
    folder = tmp_path / "chosen"
    words = [*IMAGES, "verify.steps=1", f"hydra.run.dir={tmp_path}/${{clip.mode}}"]
    assert main(["verify", *words, "clip.mode=none", "clip.threshold=null"]) == 0
    assert (tmp_path / "none" / FILE).exists()
    folder.mkdir()
    (folder / FILE).write_text("{}")
    assert main(["verify", *IMAGES, f"hydra.run.dir={folder}"]) == 2
    assert "holds an earlier verification" in capsys.readouterr().err
    assert not outputs.exists()


def test_its_help_names_its_keys(capsys):
    assert main(["verify", "--help"]) == 0
    assert "verify.tolerance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("traceback", "said"),
    [
        (f"{STACK}ValueError: one\ntwo\n", "ValueError: one\ntwo"),
        (f"{STACK}a.b.Error: one\n  more", "a.b.Error: one\n  more"),
        (f"{STACK}KeyError: 1\n\nDuring that:\n\n{STACK}AssertionError", "AssertionError"),
        ("Signal 9 (SIGKILL) received", "Signal 9 (SIGKILL) received"),
        ("", "no reason was given"),
    ],
)
def test_an_error_is_told_without_its_traceback(traceback, said):
    assert exception_only(traceback) == said
