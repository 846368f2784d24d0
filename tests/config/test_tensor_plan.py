"""Plans of tensor parallelism, given as such or by the path of a file."""

import copy

import pytest

from runner.compose.request import request
from runner.config.check import parse
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.config.tensor_plan import STYLES, settled

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TEXT = "# mine\nblocks.*.up: colwise\nblocks.*.down: rowwise\n"


def job(plan):
    [only] = request(["plugin=tensor", f"plugin.tp_plan={plan}"], writes=False).jobs
    return only


def refusal(plan):
    with pytest.raises(RequestError) as error:
        job(plan)
    [problem] = error.value.problems
    assert problem.key == "plugin.tp_plan"
    return problem.message


def test_a_plan_is_taken_as_it_is():
    found = job("{blocks.*.up:colwise,blocks.*.down:rowwise}")
    assert found.config.plugin.tp_plan == found.plain["plugin"]["tp_plan"] == PLAN
    assert job("null").config.plugin.tp_plan is None


def test_every_style_is_known():
    plan = ",".join(f"m{number}:{style}" for number, style in enumerate(STYLES))
    assert len(job(f"{{{plan}}}").config.plugin.tp_plan) == len(STYLES)


def test_of_a_file_the_content_goes_on(tmp_path, monkeypatch):
    file = tmp_path / "plan.yaml"
    file.write_text(TEXT)
    found = job(file)
    assert found.config.plugin.tp_plan == PLAN
    assert found.plain["plugin"]["tp_plan"] == PLAN
    monkeypatch.chdir(tmp_path)
    assert job("plan.yaml").plain == found.plain
    file.unlink()  # a rank needs it no more
    assert parse(found.plain) == found.config


def test_the_hash_is_that_of_the_content(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(TEXT)
    first = job(file)
    assert first.hash == config_hash(first.plain)
    assert first.hash == job("{blocks.*.up:colwise,blocks.*.down:rowwise}").hash
    file.write_text(TEXT.replace("rowwise", "colwise_rep"))
    assert job(file).hash != first.hash


def test_the_other_process_that_composes_settles_the_same(tmp_path):
    (tmp_path / "plan.yaml").write_text(TEXT)
    composed = {"seed": 1, "plugin": {"name": "tensor", "tp_plan": str(tmp_path / "plan.yaml")}}
    before = copy.deepcopy(composed)
    assert settled(composed)["plugin"]["tp_plan"] == PLAN
    assert composed == before
    assert settled(settled(composed)) == settled(composed)
    lost = {"plugin": {"tp_plan": str(tmp_path / "none.yaml")}}
    assert settled(lost) == lost
    assert settled({"plugin": "???"}) == {"plugin": "???"}


@pytest.mark.usefixtures("outputs")
def test_a_run_is_handed_the_plan_that_was_checked(tmp_path, monkeypatch):
    from runner.cli import run as cli
    from runner.launch import supervise

    handed = []

    def run(config, plain, folder, words, **further):
        handed.append(plain)
        return supervise.Ended(0)

    monkeypatch.setattr(cli, "check_jobs", lambda jobs: handed.append(jobs[0].plain))
    monkeypatch.setattr(supervise, "run", run)
    (tmp_path / "plan.yaml").write_text(TEXT)
    assert cli.main(["plugin=tensor", f"plugin.tp_plan={tmp_path}/plan.yaml"]) == 0
    checked, started = handed
    assert checked["plugin"]["tp_plan"] == started["plugin"]["tp_plan"] == PLAN
    assert config_hash(checked) == config_hash(started)


def test_a_library_may_hand_a_path_to_the_check(tmp_path):
    plain = job("null").plain
    (tmp_path / "plan.yaml").write_text(TEXT)
    plain["plugin"]["tp_plan"] = str(tmp_path / "plan.yaml")
    assert parse(plain).plugin.tp_plan == PLAN


def test_an_unknown_style_leads_to_the_nearest():
    message = refusal("{blocks.*.up:colwse}")
    assert "blocks.*.up has the unknown style colwse; did you mean colwise?" in message
    assert "(styles: colwise, rowwise, colwise_rep, embedding_rowwise, " in message


@pytest.mark.parametrize(("word", "style"), [("row", "rowwise"), ("column", "colwise")])
def test_what_others_call_a_style(word, style):
    assert f"did you mean {style}?" in refusal(f"{{head:{word}}}")


def test_every_unknown_style_is_named(tmp_path):
    (tmp_path / "plan.yaml").write_text("a: rowise\nb: null\nc: [colwise]\nd: colwise\n")
    message = refusal(tmp_path / "plan.yaml")
    assert "a has the unknown style rowise; did you mean rowwise?" in message
    assert "b has the unknown style null, c has the unknown style [colwise]" in message
    assert "d has" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold one pattern at least"),
        ("{}", "must hold one pattern at least"),
        ("- a\n- b\n", "must hold patterns of module names with their styles"),
        ("3\n", "must hold patterns of module names with their styles"),
        ("colwise\n", "must hold patterns of module names with their styles"),
        ("1: colwise\n", "1 is no pattern"),
        ("a: colwise\na: rowwise\n", "duplicate key"),
        ("a: {b: colwise}\n", "a has the unknown style {b:colwise}"),
        ("a: [colwise\n", "cannot be read: line"),
        ("a: ${b\n", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_plan(tmp_path, text, said):
    (tmp_path / "plan.yaml").write_text(text)
    message = refusal(tmp_path / "plan.yaml")
    assert str(tmp_path / "plan.yaml") in message
    assert said in message


def test_a_file_that_cannot_be_read(tmp_path):
    assert f"there is no file {tmp_path}/plan.yaml" in refusal(tmp_path / "plan.yaml")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\xfa")
    assert "cannot be read" in refusal(tmp_path / "plan.yaml")


def test_a_file_that_nobody_reads_is_refused_with_its_option(tmp_path):
    (tmp_path / "plan.yaml").write_text(TEXT)
    with pytest.raises(RequestError, match="plugin=tensor or plugin=hybrid has tensor"):
        request(["plugin=ddp", f"plugin.tp_plan={tmp_path}/plan.yaml"], writes=False)
