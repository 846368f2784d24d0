"""``--json``: one line of JSON on standard output, everything else on standard error."""

import json

import pytest

from runner.bench.timing import row
from runner.cli.main import main
from tests.cli.test_run import TINY


@pytest.fixture
def answer(outputs, capfd):
    """Run a command with ``--json``; its exit code and the one line that it answers."""

    def ask(*words):
        code = main([*words, "--json"])
        [line] = capfd.readouterr().out.splitlines()
        content = json.loads(line)
        assert content["exit_code"] == code
        return content

    return ask


def test_a_refusal_describes_each_problem_in_parts(answer):
    content = answer("clip=nrom", "optimizer.lrr=3")
    first, second = content["problems"]
    assert (first["key"], first["value"], first["suggestion"]) == ("clip", "nrom", "norm")
    assert (second["key"], second["value"]) == ("optimizer.lrr", 3)
    assert second["suggestion"] == "optimizer.lr"
    assert second["message"].startswith("unknown key")


def test_a_refusal_masks_secrets(answer):
    content = answer("+optimizer.github_token=ghp_hidden", "clip=nrom")
    assert "ghp_hidden" not in json.dumps(content)


def test_a_plan_lists_its_runs(answer):
    content = answer("plan", "-m", "clip.threshold=0.5,1", *TINY)
    steps = [run["steps"] for run in content["runs"]]
    states = {run["state"] for run in content["runs"]}
    assert (steps, states) == ([1, 1], {"to run"})


def test_a_plan_says_of_each_run_what_ranks_send(answer):
    tiny = [word for word in TINY if not word.startswith("data.batch_size")]
    ranks = ("plugin=ddp", "plugin.nproc=2", "data.batch_size=2")
    content = answer("plan", "-m", *tiny, *ranks, "accumulation=x2,none")
    sent = [run["communication"] for run in content["runs"]]
    assert "2 microbatches" in sent[0]
    assert "2 microbatches" not in sent[1]


def test_a_run_answers_its_folder_and_summary(answer, outputs):
    content = answer(*TINY)
    [folder] = (outputs / "runs").iterdir()
    assert content["folder"] == str(folder)
    assert content["summary"]["steps"] == 1


def test_an_evaluation_answers_the_metrics_of_the_checkpoint(answer, outputs):
    run = answer(*TINY[:-1], "hydra.run.dir=" + str(outputs / "one"))
    content = answer("evaluate", run["folder"])
    assert content["metrics"]["eval/loss"] == run["summary"]["final"]["eval/loss"]


def test_a_calibration_answers_what_its_file_says(answer):
    content = answer("calibrate", "calibrate.steps=8", *TINY)
    with open(content["file"], encoding="utf-8") as file:
        description = json.load(file)
    assert {**description, "exit_code": 0, "file": content["file"]} == content


def test_a_verification_answers_whether_the_steps_are_equal(answer):
    content = answer("verify", "verify.steps=1", "accumulation=x2", *TINY)
    assert content["ok"] is True
    assert content["max_rel_error"] <= content["tolerance"]


def test_a_benchmark_answers_its_tables(answer, tmp_path, monkeypatch):
    monkeypatch.setattr("runner.bench.clip.rows", lambda setting: [row("first", [1.0])])
    content = answer("bench", "clip", "--quick", "--output", str(tmp_path / "out"))
    [first] = content["tables"]["clip"]["rows"]
    assert first["median"] == 1.0
