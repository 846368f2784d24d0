"""Plans of tensor parallelism, given as such or by the path of a file."""

import pytest

from runner.compose.request import request
from runner.config.check import parse
from runner.config.identity import config_hash
from runner.config.plugin_section import STYLES
from runner.config.problem import RequestError

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TYPED = "{blocks.*.up:colwise,blocks.*.down:rowwise}"
TEXT = "# mine\nblocks.*.up: colwise\nblocks.*.down: rowwise\n"


def job(plan):
    [only] = request(["plugin=tensor", f"plugin.tp_plan={plan}"], writes=False).jobs
    return only


@pytest.fixture
def file(tmp_path):
    (tmp_path / "plan.yaml").write_text(TEXT)
    return tmp_path / "plan.yaml"


def test_a_plan_is_taken_as_it_is():
    found = job(TYPED)
    assert found.config.plugin.tp_plan == found.plain["plugin"]["tp_plan"] == PLAN
    plan = ",".join(f"m{number}:{style}" for number, style in enumerate(STYLES))
    assert len(job(f"{{{plan}}}").config.plugin.tp_plan) == len(STYLES)


def test_of_a_file_the_content_goes_on(file, monkeypatch):
    found, other = job(file), job("null").plain
    assert found.plain == job(TYPED).plain
    assert found.hash == config_hash(found.plain) == job(TYPED).hash
    monkeypatch.chdir(file.parent)
    assert job("plan.yaml").plain == found.plain
    other["plugin"]["tp_plan"] = str(file)  # a library may give a path to the check
    assert parse(other).plugin.tp_plan == PLAN
    file.write_text(TEXT.replace("rowwise", "colwise_rep"))
    assert job(file).hash != found.hash
    file.unlink()  # a rank needs it no more
    assert parse(found.plain) == found.config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["must be patterns of modules with styles"]),
        ("a: colwise\na: rowwise\n", ["duplicate key"]),
        ("a: {b: colwise}\n", ["a has the unknown style {b:colwise}"]),
        ("a: row\nb: null\n", ["did you mean rowwise?", "b has the unknown style null"]),
        ("a: [colwise\n", ["line 2, column 1"]),
        (None, ["there is no file"]),
    ],
)
def test_a_file_that_holds_no_plan_is_named(file, text, parts):
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(RequestError) as error:
        job(file)
    [problem] = error.value.problems
    assert problem.key == "plugin.tp_plan"
    for part in [str(file), *parts]:
        assert part in problem.message
