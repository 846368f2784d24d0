"""The wheel carries conf and recipes, and trains from an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch.ends import read, rows_of

ROOT = Path(__file__).resolve().parents[1]


def ended(command, timeout=600, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built_from_a_copy(folder, umask, seconds):
    """Wheel and sdist of the tracked files, built in another folder, at another time."""
    before = os.umask(umask)
    try:
        for name in ended(["git", "ls-files", "-z"], cwd=ROOT).split("\0"):
            if (ROOT / name).is_file():
                copy = folder / "checkout" / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy)
                os.utime(copy, (seconds, seconds))
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")]
        when = {"SOURCE_DATE_EPOCH": "1700000000", "TZ": f"UTC{seconds % 12}"}
        ended(command, cwd=folder / "checkout", env=os.environ | when)
    finally:
        os.umask(before)
    return {file.suffix: file for file in (folder / "dist").iterdir()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built_from_a_copy(tmp_path_factory.mktemp("wheel"), 0o022, 1_600_000_001)[".whl"]


def test_it_carries_all(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("conf", "runner/_conf"), ("recipes", "runner/_recipes")):
        for file in (ROOT / folder).rglob("*.yaml"):
            assert f"{inside}/{file.relative_to(ROOT / folder).as_posix()}" in names
    plotly = [f"runner/report/plotly/{name}" for name in ("about.json", "LICENSE")]
    assert {"runner/py.typed", *plotly} < names
    assert not [name for name in names if name.startswith(("tests/", "outputs/", "conf/"))]


def test_builds_elsewhere_are_equal_to_the_byte(wheel, tmp_path):
    first = {file.suffix: file for file in wheel.parent.iterdir()}
    second = built_from_a_copy(tmp_path / "deeper" / "b", 0o077, 1_700_000_007)
    assert first.keys() == second.keys() == {".gz", ".whl"}
    for kind in first:
        assert first[kind].read_bytes() == second[kind].read_bytes(), kind


@pytest.fixture
def python_says(wheel, tmp_path):
    """What Python prints in an empty folder, with the wheel installed."""
    home = tmp_path / "venv"
    empty = tmp_path / "empty"
    ended([sys.executable, "-m", "venv", "--without-pip", str(home)])
    empty.mkdir()
    site = next(home.glob("lib/python3*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # What the wheel depends on is borrowed; the checkout is not among it.
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RUNNER_OUTPUTS")}
    kept |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def says(*words):
        return ended([str(home / "bin" / "python"), *words], cwd=empty, env=kept)

    assert site in Path(says("-c", "import runner; print(runner.__file__)").strip()).parents
    return says


def test_it_runs_the_main_job_from_an_empty_folder(python_says, tmp_path):
    assert "accumulate_4" in python_says("-m", "runner", "--help")
    python_says("-m", "runner", "clip=norm", "clip.threshold=0.25")
    (folder,) = (tmp_path / "empty" / "outputs" / "runs").iterdir()
    assert read(folder, "summary.json")["final"]["eval/accuracy"] >= 0.97


@pytest.mark.parametrize(
    "words",
    [
        "plugin=tensor plugin.nproc=2 plugin.tp_plan={layers.0:colwise,layers.2:rowwise}",
        pytest.param("-m clip.threshold=0.25,1 plugin=ddp plugin.nproc=2", marks=pytest.mark.slow),
        pytest.param("hydra.run.dir=one checkpoint.interval=5ba", marks=pytest.mark.slow),
    ],
)
def test_the_example_of_readme_trains(python_says, tmp_path, words):
    """Split over two ranks, over two ranks in a sweep, and continued in one process."""
    empty = tmp_path / "empty"
    readme = (ROOT / "README.md").read_text()
    [code] = re.findall(r"```python\n(# mine.py\n.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) <= 28
    (empty / "mine.py").write_text(code)
    [command] = re.findall(
        r"^    python (-m runner model=mine.Net .* data=mine.points .*)$", readme, re.MULTILINE
    )
    command = [*command.split(), "tracker=none"]
    python_says(*command, *words.split(), "train.max_duration=5ba")
    if "one" in words:
        python_says(*command, "resume=one", "train.max_duration=7ba")
    files = sorted(empty.glob("**/metrics.jsonl"))
    steps = [[row["train/step"] for row in rows_of(file.parent)] for file in files]
    first_steps = [*range(1, 6)]
    assert steps == (
        [first_steps, first_steps]
        if "-m" in words
        else [first_steps, [6, 7]]
        if "one" in words
        else [first_steps]
    )


def interpreter(minor):
    """The newest interpreter of a minor version that is at hand."""
    managed = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
    return managed[-1] if managed else shutil.which(f"python3.{minor}")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("interpreter", [*filter(None, map(interpreter, (11, 12, 13)))], ids=str)
def test_the_installed_wheel_trains_under_each_python(interpreter, wheel, tmp_path):
    """Installs torch from the configured package index, which takes minutes."""
    home = tmp_path / "venv"
    ended([str(interpreter), "-m", "venv", str(home)])
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RUNNER_OUTPUTS")}

    def run(*words, folder=tmp_path, timeout=600):
        ended([str(home / "bin" / "python"), "-m", *words], timeout, cwd=folder, env=kept)

    constraints = str(ROOT / "constraints.txt")
    run("pip", "install", "-q", str(wheel), "-c", constraints, timeout=1800)
    run("runner", "new", "demo")
    run("runner", "--config-dir", "conf", "recipe=demo", folder=tmp_path / "demo")
    [summary] = (tmp_path / "demo" / "outputs" / "runs").glob("*/summary.json")
    assert json.loads(summary.read_text())["final"]["eval/accuracy"] > 0.9
    run("runner", "plugin=ddp", "plugin.nproc=2", "train.max_duration=20ba", "tracker=none")
