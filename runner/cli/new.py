"""``python -m runner new NAME``: write a folder with a model, data, a recipe and a test to edit."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

from runner.config.folders import find, obstacle, options
from runner.config.problem import Problem, RequestError
from runner.run_folder import files, keys
from runner.telemetry.sinks.console import print_line

DESCRIPTION = """\
Write the folder NAME with a model and a data set of your own to edit: their code in NAME.py, the
options model=NAME and data=NAME and the recipe NAME in conf, and a test. It trains as it is:

  python -m runner new demo
  cd demo
  python -m runner --config-dir conf recipe=demo
  python -m pytest"""

CODE = '''\
"""A model and a data set of your own. The files in conf/ name them, and give their arguments."""

import torch
from runner.data import Data
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Dataset


class Net(nn.Module):
    """Classify rows of numbers by one hidden layer.

    Args:
        features: number of columns of a row.
        width: number of units of the hidden layer.
        num_classes: number of classes.
    """

    def __init__(self, features: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [N, num_classes] of rows [N, features]."""
        return self.layers(inputs)


class Tumours(Dataset):
    """569 tumours of scikit-learn's breast cancer data: 30 measurements [30], and 0 or 1.

    Args:
        train: whether to take the samples for training, or those that are held out.
        test_fraction: share of the samples that is held out, between 0 and 1.
    """

    def __init__(self, train: bool, test_fraction: float) -> None:
        measured, benign = load_breast_cancer(return_X_y=True)
        order = torch.randperm(len(benign), generator=torch.Generator().manual_seed(0))
        held_out, rest = order.tensor_split([round(test_fraction * len(order))])
        inputs = torch.tensor(measured, dtype=torch.float32)
        inputs = (inputs - inputs[rest].mean(dim=0)) / inputs[rest].std(dim=0)
        chosen = rest if train else held_out
        self.inputs, self.targets = inputs[chosen], torch.tensor(benign)[chosen]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def tumours(test_fraction: float) -> Data:
    """Return the samples for training and those that are held out."""
    train, test = (Tumours(part, test_fraction) for part in (True, False))
    return Data(train=train, test=test, items="samples")
'''

MODEL = """\
# The network of $name.py.
# python -m runner --config-dir conf model=$name data=$name
_target_: $name.Net
features: 30
width: 32
num_classes: 2
"""

DATA = """\
# The data of $name.py. data.num_workers and data.drop_last have their usual values.
# python -m runner --config-dir conf model=$name data=$name
_target_: $name.tumours
test_fraction: 0.2
batch_size: 16 # samples in one microbatch of one data-parallel rank
"""

RECIPE = """\
# $name: a small network on measurements of tumours, with a total gradient norm of at most 1.
# command: python -m runner --config-dir conf recipe=$name
# Give only what differs from the usual values; python -m runner --help lists all keys.
defaults:
  - override /model: $name
  - override /data: $name
  - override /clip: norm
  - override /optimizer: sgd

clip:
  threshold: 1.0
optimizer:
  lr: 0.05
train:
  max_duration: 5ep
"""

TEST = '''\
"""Run these tests in this folder: python -m pytest."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from $name import Net, Tumours

HERE = Path(__file__).resolve().parent


def test_the_model_returns_one_logit_for_each_class():
    assert Net(features=30, width=8, num_classes=2)(torch.zeros(5, 30)).shape == (5, 2)


def test_no_sample_is_both_trained_on_and_held_out():
    train, test = (Tumours(part, test_fraction=0.2) for part in (True, False))
    assert (len(train), len(test)) == (455, 114)
    assert torch.cdist(train.inputs, test.inputs).min() > 0


def test_the_recipe_learns(tmp_path):
    command = [sys.executable, "-m", "runner", "--config-dir", "conf", "recipe=$name"]
    changed = ["tracker=none", f"hydra.run.dir={tmp_path / 'run'}"]
    subprocess.run([*command, *changed], cwd=HERE, check=True, timeout=300)
    summary = json.loads((tmp_path / "run" / "$summary").read_text())
    assert summary["final"]["$accuracy"] > 0.9
'''

FILES = {
    "$name.py": CODE,
    "test_$name.py": TEST,
    "conf/model/$name.yaml": MODEL,
    "conf/data/$name.yaml": DATA,
    "conf/recipe/$name.yaml": RECIPE,
}
"""The files of the folder by name; ``$name`` stands for the name of the folder, ``$summary`` and
``$accuracy`` for the file and the metric that its test reads."""

_VALUES = {"true", "false", "null", "none", "nan", "inf"}
"""Words that are no text in an override: ``recipe=null`` chooses nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and print the commands to run next.

    Raises:
        RequestError: the name cannot be used, or the folder cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m runner new",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="folder, module and options to write")
    name = parser.parse_args(argv).name
    folder = Path(name).absolute()
    if message := _refused(name) or _taken(name) or obstacle(folder):
        raise RequestError([Problem("NAME", name, message)])
    values = {"name": name, "summary": files.SUMMARY, "accuracy": keys.EVAL_ACCURACY}
    try:
        folder.mkdir()
        for file, text in FILES.items():
            path = folder / Template(file).substitute(values)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(text).substitute(values), encoding="utf-8")
            print_line(str(path.relative_to(folder.parent)))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise RequestError([Problem("NAME", name, message)]) from None
    print_line(f"\ncd {name}")
    print_line(f"python -m runner --config-dir conf recipe={name}")
    print_line("python -m pytest")
    return 0


def _refused(name: str) -> str | None:
    """Return why ``name`` cannot be that of a module and of options."""
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and not keyword.iskeyword(name):
        return "is no text in an override; choose another name" if name.lower() in _VALUES else None
    near = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    near = f"my_{near}" if near and (near[0].isdigit() or keyword.iskeyword(near)) else near
    hint = f"; did you mean {near}?" if near else ""
    return f"must be a Python identifier in ASCII, such as my_model{hint}"


def _taken(name: str) -> str | None:
    """Return what has the name ``name`` already."""
    if os.path.lexists(name):
        return "exists already; choose another name or remove it"
    for group in ("model", "data"):
        if name in options(group):
            return f"is an option of {group} already; choose another name"
    if (find("recipes") / f"{name}.yaml").is_file():
        return "is a recipe already; choose another name"
    elsewhere = [path for path in sys.path if path and Path(path) != Path.cwd()]
    found = PathFinder.find_spec(name, elsewhere)
    if name in sys.stdlib_module_names or (found is not None and found.origin is not None):
        return "is a module that Python finds already; choose another name"
    return None
