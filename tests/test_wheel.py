"""The wheel carries conf and recipes, and runs the main job from an empty folder."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_what_it_carries(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("conf", "runner/_conf"), ("recipes", "runner/_recipes")):
        for file in (ROOT / folder).rglob("*.yaml"):
            assert f"{inside}/{file.relative_to(ROOT / folder).as_posix()}" in names
    assert "runner/py.typed" in names
    for name in ("plotly-cartesian.min.js", "about.json", "LICENSE"):
        assert f"runner/report/plotly/{name}" in names
    assert not [name for name in names if name.startswith(("tests/", "outputs/", "conf/"))]


def built_from_a_copy(folder, umask, seconds):
    """Wheel and sdist of the tracked files, built in another folder, at another time."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before = os.umask(umask)
    try:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                copy = folder / "checkout" / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy)
                os.utime(copy, (seconds, seconds))
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")],
            cwd=folder / "checkout",
            env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000", "TZ": f"UTC{seconds % 12}"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name: file.read_bytes() for file in (folder / "dist").iterdir()}


def test_builds_from_other_folders_at_other_times_are_equal_to_the_byte(tmp_path):
    first = built_from_a_copy(tmp_path / "a", 0o022, 1_600_000_001)
    second = built_from_a_copy(tmp_path / "deeper" / "b", 0o077, 1_700_000_007)
    assert sorted(Path(name).suffix for name in first) == [".gz", ".whl"]
    assert first == second
    [wheel] = (tmp_path / "a" / "dist").glob("*.whl")
    assert {info.date_time for info in zipfile.ZipFile(wheel).infolist()} == {
        (2023, 11, 14, 22, 13, 20)
    }


@pytest.fixture
def python_says(wheel, tmp_path):
    """What Python prints in an empty folder, with the wheel installed."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    site = next(home.glob("lib/python3*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # What the wheel depends on is borrowed; the checkout is not among it.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RUNNER_OUTPUTS")}
    environment = kept | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def says(*words):
        done = subprocess.run(
            [str(python), *words],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    origin = Path(says("-c", "import runner; print(runner.__file__)").strip())
    assert site in origin.parents
    return says


def test_it_runs_the_main_job_from_an_empty_folder(python_says, tmp_path):
    assert "accumulate_4" in python_says("-m", "runner", "--help")
    python_says("-m", "runner", "clip=norm", "clip.threshold=0.25")
    (folder,) = (tmp_path / "empty" / "outputs" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final"]["eval/accuracy"] >= 0.97


def interpreters():
    """The newest interpreter of each minor version that is at hand."""
    found = {}
    for minor in (11, 12, 13):
        managed = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}")
        on_path = shutil.which(f"python3.{minor}")
        for one in [*([on_path] if on_path else []), *map(str, sorted(managed))]:
            asked = [one, "-c", "import sys; print(sys.version_info[:2])"]
            said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            if said.strip() == f"(3, {minor})":
                found[f"3.{minor}"] = one
    return [pytest.param(path, id=name) for name, path in found.items()]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("interpreter", interpreters())
def test_it_installs_and_trains_under_each_python(interpreter, wheel, tmp_path):
    """Installs torch from the configured package index, which takes minutes."""
    home = tmp_path / "venv"
    subprocess.run([interpreter, "-m", "venv", str(home)], check=True, timeout=120)
    python = str(home / "bin" / "python")
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RUNNER_OUTPUTS")}
    environment = kept | {"OMP_NUM_THREADS": "1"}

    def run(*words, folder=tmp_path, timeout=300):
        done = subprocess.run(
            [python, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    constraints = str(ROOT / "constraints.txt")
    run("-m", "pip", "install", "-q", str(wheel), "-c", constraints, timeout=1800)
    run("-m", "runner", "new", "demo")
    run("-m", "runner", "--config-dir", "conf", "recipe=demo", folder=tmp_path / "demo")
    [summary] = (tmp_path / "demo" / "outputs" / "runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["final"]["eval/accuracy"] > 0.9
    ranks = ["plugin=ddp", "plugin.nproc=2", "train.max_duration=20ba", "tracker=none"]
    run("-m", "runner", *ranks)


@pytest.mark.parametrize(
    ("model", "logged"),
    [
        ("Tagger", "eval/accuracy"),
        pytest.param("Line", "eval/r2", marks=pytest.mark.slow),
        pytest.param("TwoInputs", "eval/f1", marks=pytest.mark.slow),
    ],
)
def test_dictionaries_regression_and_two_inputs_of_readme_train(
    python_says, tmp_path, model, logged
):
    if logged != "eval/accuracy":
        pytest.importorskip("torchmetrics")
    (tmp_path / "empty" / "others.py").write_text(shown_as("others.py"))
    words = command_with(f"model._target_=others.{model} ")
    python_says(*words, "train.max_duration=96ba", "tracker=none")
    rows, summary = recorded(tmp_path)
    assert summary["final"][logged] > 0.5
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / 2


def shown_as(name):
    """The code that README says to save under a name."""
    return re.search(rf"Save this as `{name}`:\n\n```python\n(.*?)```", README, re.DOTALL)[1]


def command_with(part):
    [command] = [line.strip() for line in README.splitlines() if part in line]
    return shlex.split(command)[1:]


def recorded(tmp_path):
    (folder,) = (tmp_path / "empty" / "outputs" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows], summary


def test_a_stream_of_readme_trains_over_two_ranks_with_workers(python_says, tmp_path):
    [data_sets] = re.findall(r"```python\n(from torch\.utils\.data .*?)```", README, re.DOTALL)
    (tmp_path / "empty" / "mine.py").write_text(shown_as("mine.py") + data_sets)
    python_says(*command_with("data.train._target_=mine.Flow "), "tracker=none")
    rows, summary = recorded(tmp_path)
    assert (summary["steps"], summary["world_size"]) == (100, 2)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / 2


def test_a_folder_of_datasets_trains_as_readme_shows(python_says, tmp_path):
    library = pytest.importorskip("datasets")
    draw = random.Random(0)
    labels = [draw.randrange(10) for _ in range(320)]
    rows = [{"image": [[[draw.gauss(0, 1) + label] * 8] * 8], "label": label} for label in labels]
    library.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    words = [word.replace("/path/to", str(tmp_path)) for word in command_with(" data=datasets ")]
    python_says(*words, "tracker=none")
    rows, summary = recorded(tmp_path)
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    assert "eval/accuracy" in summary["final"]
