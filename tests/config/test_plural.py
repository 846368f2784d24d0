from runner.config.plural import plural


def test_one_is_singular_and_all_else_plural():
    assert [plural(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert plural(1234, "step", ",") == "1,234 steps"
