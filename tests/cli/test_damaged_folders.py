"""A folder of a stranger: each reader ends with one sentence, and never hangs or crashes."""

import hashlib
import json
import os

import pytest
import torch
import yaml

from runner.checkpoint.content import STATE_KEYS
from runner.cli.main import main
from runner.request.request import request
from tests.report.examples import NORM, rows, sweep, write_run

DEEP = 200_000
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
DAMAGES = {
    "deep JSON": lambda file: file.write_text('{"a":' * DEEP + "1" + "}" * DEEP),
    "deep list": lambda file: file.write_text("[" * DEEP + "]" * DEEP),
    "deep YAML": lambda file: file.write_text("- " * DEEP + "x"),
    "bomb": lambda file: file.write_text(BOMB),
    "itself": lambda file: file.write_text("a: &a [*a]\n"),
    "pipe": os.mkfifo,
    "zeros": lambda file: file.symlink_to("/dev/zero"),
    "folder": lambda file: file.mkdir(),
    "large": lambda file: os.truncate(os.open(file, os.O_CREAT | os.O_WRONLY), 2**33),
    "none": lambda file: file.write_bytes(b"\xff" * 64),
}
SPECIAL = ["pipe", "zeros", "folder"]
JSON, YAML = (
    ["deep JSON", "deep list", "large", *SPECIAL],
    ["deep YAML", "bomb", "itself", *SPECIAL],
)
FINAL, STEP = "run/checkpoints/final", "run/checkpoints/step_000000003"
READERS = [
    ("report {run}", "run/status.json", JSON),
    ("report {run}", "run/summary.json", JSON),
    ("report {run}", "run/metrics.jsonl", ["large", *SPECIAL]),
    ("report {run}", "run/config.yaml", [*YAML, "large", "deep list"]),
    ("report {run}", "run/.hydra/overrides.yaml", YAML),
    ("report {run}", "run/.hydra/hydra.yaml", YAML),
    ("report {sweep}", "sweeps/s/sweep.json", ["large", *SPECIAL]),
    ("report {sweep}", "sweeps/s/1/status.json", JSON),
    ("evaluate {run}", "run/config.yaml", [*YAML, "large", "deep list"]),
    ("evaluate {run}", f"{FINAL}/manifest.json", JSON),
    ("evaluate {run}", f"{FINAL}/a.safetensors", SPECIAL),
    ("export {run}", f"{FINAL}/manifest.json", JSON),
    ("export {run}", f"{FINAL}/a.safetensors", ["none", *SPECIAL]),
    ("export {run} --checkpoint best", "run/config.yaml", [*YAML, "deep list"]),
    ("resume={run}", f"{STEP}/manifest.json", JSON),
    ("resume={run}", f"{STEP}/a.safetensors", SPECIAL),
    ("resume={run}", f"{STEP}/state.pt", ["none", *SPECIAL]),
    ("hydra.run.dir={run}", "run/status.json", JSON),
    ("plan -m clip.threshold=1,2 sweep.name=s", "sweeps/s/sweep.json", [*JSON, "none"]),
    ("plan plugin.tp_plan={run}/plan.yaml plugin=tensor", "run/plan.yaml", YAML),
]


def sign(checkpoint):
    """Write a manifest that fits the files, where they are files."""
    listed = {}
    for name in ("a.safetensors", "state.pt"):
        if (checkpoint / name).is_file():
            listed[name] = {"sha256": hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}
        elif os.path.lexists(checkpoint / name):
            listed[name] = {"sha256": "0" * 64}
    manifest = {"version": 4, "step": 3, "files": listed}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def composed():
    [job] = request(["device=cpu", "tracker=none"]).jobs
    return job.plain


@pytest.fixture
def home(tmp_path, composed, outputs):
    """The folder of a run with checkpoints, and that of a sweep."""
    write_run(tmp_path / "run", rows(steps=20), composed)
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_text("hydra: {}\n")
    for name in (FINAL, STEP):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.safetensors").write_bytes(b"x" * 100)
    torch.save(dict.fromkeys(STATE_KEYS, 0), tmp_path / STEP / "state.pt")
    outputs.mkdir()
    (outputs / "sweeps").symlink_to(tmp_path / "sweeps")
    sweep(tmp_path / "sweeps" / "s", NORM, steps=10)
    for name in (FINAL, STEP):
        sign(tmp_path / name)
    return tmp_path


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("words", "name", "damages"), READERS)
def test_a_reader_names_the_file_that_is_damaged(home, words, name, damages, capsys):
    file = home / name
    run, folder = home / "run", home / "sweeps" / "s"
    more = [] if words.startswith(("report", "evaluate", "export")) else ["device=cpu"]
    for damage in damages:
        if os.path.lexists(file):
            file.rmdir() if file.is_dir() else file.unlink()
        DAMAGES[damage](file)
        if file.name in ("a.safetensors", "state.pt"):
            sign(file.parent)
        capsys.readouterr()
        code = main([*words.format(run=run, sweep=folder).split(), *more])
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if "this request cannot be run" not in line]
        assert code in (1, 2), (damage, code)
        assert "Traceback" not in said, damage
        assert len(lines) == 1, (damage, said)
        assert file.name in said or str(file.parent) in said, (damage, said)
        print(damage, words, code, lines[0])


def test_an_ordinary_file_with_anchors_and_a_deep_file_that_fits_are_read(home, capsys):
    file = home / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    shared = {"a": [1, 2]}
    config["model"] |= {"first": shared, "second": shared}
    file.write_text(yaml.safe_dump(config) + "deep: " + "[" * 60 + "]" * 60 + "\n")
    assert "&id001" in file.read_text()
    assert main(["report", str(home / "run")]) == 0
    assert capsys.readouterr().err == ""
