"""Where configuration and outputs lie."""

from runner.config.folders import find, outputs


def test_outputs_follow_the_environment_or_lie_in_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in (str(tmp_path / "here"), "here"):
        monkeypatch.setenv("RUNNER_OUTPUTS", value)
        assert outputs() == tmp_path / "here"
    monkeypatch.delenv("RUNNER_OUTPUTS")
    assert outputs() == find("conf").parent / "outputs"
