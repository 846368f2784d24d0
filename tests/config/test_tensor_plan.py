"""Plans of tensor parallelism, given as such or by the path of a file."""

import pytest

from runner.config.plugin_section import STYLES
from runner.config.schema import parse
from tests.config.composed import changed, plain, problems

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TYPED = "plugin.tp_plan={blocks.*.up:colwise,blocks.*.down:rowwise}"
TEXT = "# mine\nblocks.*.up: colwise\nblocks.*.down: rowwise\n"


def test_a_plan_is_taken_as_it_is_and_of_a_file_the_content_goes_on(tmp_path):
    typed, file = plain("plugin=tensor", TYPED), tmp_path / "plan.yaml"
    assert parse(typed).plugin.tp_plan == typed["plugin"]["tp_plan"] == PLAN
    every = {f"m{number}": style for number, style in enumerate(STYLES)}
    assert parse(changed(typed, "plugin.tp_plan", every)).plugin.tp_plan == every
    file.write_text(TEXT)
    given = plain("plugin=tensor", f"plugin.tp_plan={file}")
    assert given == plain("plugin=tensor", TYPED)
    assert parse(changed(given, "plugin.tp_plan", str(file))).plugin.tp_plan == PLAN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least 1 item"),
        ("a: colwise\na: rowwise\n", "duplicate key"),
        ("a: row\n", "did you mean rowwise?"),
        ("a: [colwise\n", "line 2, column 1"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_holds_no_plan_is_named(tmp_path, text, said):
    file = tmp_path / "plan.yaml"
    if text is not None:
        file.write_text(text)
    found = problems(changed(plain("plugin=tensor"), "plugin.tp_plan", str(file)))
    assert list(found) == ["plugin.tp_plan"]
    assert said in found["plugin.tp_plan"]
