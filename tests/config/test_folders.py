import os

import pytest

from runner.config import folders
from runner.config.folders import find, obstacle, options, outputs
from tests.mode_names import NAMES


def test_the_configuration_and_the_recipes_are_found():
    assert (find("conf") / "config.yaml").is_file()
    assert any(find("recipes").glob("*.yaml"))


def test_a_wheel_carries_its_own(tmp_path, monkeypatch):
    (tmp_path / "site" / "runner" / "_conf").mkdir(parents=True)
    monkeypatch.setattr(folders, "_PACKAGE", tmp_path / "site" / "runner")
    assert find("conf") == tmp_path / "site" / "runner" / "_conf"


def test_options_are_the_files_of_a_group():
    assert set(options("clip")) == set(NAMES)


def test_outputs_follow_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path / "here"))
    assert outputs() == tmp_path / "here"
    monkeypatch.setenv("RUNNER_OUTPUTS", "here")
    monkeypatch.chdir(tmp_path)
    assert outputs() == tmp_path / "here"


def test_outputs_of_a_checkout_lie_in_it(tmp_path, monkeypatch):
    monkeypatch.delenv("RUNNER_OUTPUTS", raising=False)
    (tmp_path / "conf").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(folders, "_PACKAGE", tmp_path / "runner")
    assert outputs() == tmp_path / "outputs"


def test_outputs_of_an_installed_package_lie_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("RUNNER_OUTPUTS", raising=False)
    (tmp_path / "site" / "runner" / "_conf").mkdir(parents=True)
    monkeypatch.setattr(folders, "_PACKAGE", tmp_path / "site" / "runner")
    monkeypatch.chdir(tmp_path)
    assert outputs() == tmp_path / "outputs"


def test_a_folder_that_can_be_made_is_no_obstacle_and_is_not_made(tmp_path):
    assert obstacle(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_on_the_way_is_an_obstacle(tmp_path):
    (tmp_path / "file").touch()
    assert "file is not a folder" in obstacle(tmp_path / "file" / "a")


def test_a_dangling_link_is_an_obstacle(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is not a folder" in obstacle(tmp_path / "link" / "a")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses")
def test_what_cannot_be_written_is_an_obstacle_for_an_administrator_too():
    from pathlib import Path

    assert "/proc" in obstacle(Path("/proc/self/runs/a"))
