"""A folder of a stranger: each reader ends with one sentence, and never hangs or crashes."""

import hashlib
import json
import os
import shutil

import pytest
import torch
import yaml

from runner.checkpoint.content import STATE_KEYS
from runner.cli.main import main
from runner.request.request import request
from tests.process import python, run_here
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
JSON = ["deep JSON", "deep list", "large", *SPECIAL]
YAML = ["deep YAML", "bomb", "itself", *SPECIAL]
FINAL = "run/checkpoints/final"
STEP = "run/checkpoints/step_000000003"
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
    ("-m clip.threshold=1,2 sweep.name=s", "sweeps/s/sweep.json", ["deep JSON", "pipe"]),
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
    run = home / "run"
    folder = home / "sweeps" / "s"
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


WITHOUT_TORCH = """
import sys
from runner.cli.main import main
sys.modules["torch"] = None  # to import it would fail
run = sys.argv[1]
sys.exit(not all(
    main([*command.split(), *more]) in (1, 2)
    for command, *more in (
        [f"evaluate {run}"],
        [f"export {run}"],
        [f"resume={run}/checkpoints/final", "device=cpu", "tracker=none"],
        [f"hydra.run.dir={run}", "device=cpu", "tracker=none"],
    )
))
"""


def test_a_damaged_folder_is_refused_before_torch_is_imported(home):
    run = home / "run"
    for file in (run / "status.json", home / FINAL / "manifest.json"):
        file.write_text("no JSON")
    said = python("-c", WITHOUT_TORCH, str(run)).stderr
    assert said.count(" is damaged: it is no JSON object") == 3
    assert "holds the record of a damaged run (status.json)" in said


TRAIN = ["device=cpu", "tracker=none", "eval.interval=3ba", "checkpoint.interval=3ba"]
TRAIN += ["data.batch_size=64"]
FOR_RUN = ["status.json", "summary.json", "metrics.jsonl", "config.yaml", ".hydra/overrides.yaml"]
FOR_RUN += [".hydra/hydra.yaml"]
FOR_FINAL = ["manifest.json", "shard-00001-model-00001-of-00001.safetensors"]
COMMANDS = {
    "report {run}": FOR_RUN,
    "evaluate {run}": [*FOR_RUN, *(f"checkpoints/final/{name}" for name in FOR_FINAL)],
    "export {run}": [*FOR_RUN, *(f"checkpoints/final/{name}" for name in FOR_FINAL)],
    "evaluate {run} --checkpoint best": FOR_RUN,
    "export {run} --checkpoint best": FOR_RUN,
    "resume={run} train.max_duration=5ba": [
        *FOR_RUN,
        *(f"checkpoints/step_000000003/{name}" for name in (*FOR_FINAL, "state.pt")),
    ],
    "resume={run}@3 train.max_duration=5ba": [*FOR_RUN, "checkpoints/step_000000003/state.pt"],
    "plan resume={run} train.max_duration=5ba": FOR_RUN,
}
"""Readers of a run, and files that each could read."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that has finished, with checkpoints after steps 3 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_here(*TRAIN, "train.max_duration=4ba", f"hydra.run.dir={folder}")
    return folder


@pytest.fixture
def copied(trained, tmp_path, outputs):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def command_of(words, run):
    more = [] if words.startswith(("report", "evaluate", "export")) else TRAIN
    return [*words.format(run=run).split(), *more]


def sign_again(file):
    """Let the manifest of a checkpoint fit its damaged file, as a stranger would."""
    if not file.is_file():
        return
    manifest = json.loads((file.parent / "manifest.json").read_text())
    if file.name in manifest["files"]:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        manifest["files"][file.name]["sha256"] = digest
        (file.parent / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "damage"), [(words, damage) for words in COMMANDS for damage in DAMAGES]
)
def test_each_reader_names_each_damaged_file_that_it_needs(copied, words, damage, capsys):
    """A file that a reader does not need, such as a report of an evaluation, changes nothing."""
    kept = copied.with_name("kept")
    shutil.copytree(copied, kept)
    wrong = {}
    for name in COMMANDS[words]:
        file = copied / name
        if damage == "large" and file.suffix in (".safetensors", ".pt"):
            continue  # weights may have any size: their hash is compared
        file.unlink()
        DAMAGES[damage](file)
        if file.suffix in (".safetensors", ".pt"):
            sign_again(file)
        capsys.readouterr()
        code = main(command_of(words, copied))
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if "this request cannot be run" not in line]
        # A run that continues has begun before it loads the weights.
        lines = [line for line in lines if line.startswith("failed: ")] or lines
        is_named = len(lines) == 1 and (file.name in said or str(file.parent) in said)
        if code not in (0, 1, 2) or "Traceback" in said or (code and not is_named):
            wrong[name] = (code, said)
        shutil.rmtree(copied)
        shutil.copytree(kept, copied)
    assert not wrong


@pytest.mark.parametrize("shape", ["anchors", "deep"])
def test_a_file_of_a_shape_within_the_limits_is_read(home, shape, capsys):
    file = home / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    if shape == "anchors":
        shared = {"a": [1, 2]}
        config["model"] |= {"first": shared, "second": shared}
    text = yaml.safe_dump(config)
    assert ("&id001" in text) == (shape == "anchors")
    if shape == "deep":
        text += "deep: " + "[" * 60 + "]" * 60 + "\n"
    file.write_text(text)
    assert main(["report", str(home / "run")]) == 0
    assert capsys.readouterr().err == ""
