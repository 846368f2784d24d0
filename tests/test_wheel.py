"""The wheel carries conf and recipes, and runs the main job from an empty folder."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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
    assert not [name for name in names if name.startswith(("tests/", "outputs/", "conf/"))]


def test_it_runs_the_main_job_from_an_empty_folder(wheel, tmp_path):
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

    def python_says(*words):
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

    origin = Path(python_says("-c", "import runner; print(runner.__file__)").strip())
    assert site in origin.parents
    assert "accumulate_4" in python_says("-m", "runner", "--help")
    python_says("-m", "runner", "clip=norm", "clip.threshold=0.25")
    (folder,) = (empty / "outputs" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final"]["eval/accuracy"] >= 0.97
