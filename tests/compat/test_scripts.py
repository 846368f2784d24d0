"""Scripts written for Colossal-AI and for Composer run with their import lines changed."""

import math
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from tests.process import ROOT, python

HERE = Path(__file__).resolve().parent


@pytest.fixture
def environment(tmp_path):
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def cifar(tmp_path, environment):
    """Random images in the real format of CIFAR-10, whose checksums nobody asks for."""
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name in names:
        images = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
        batch = {"data": images, "labels": rng.integers(0, 10, 20).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    classes = {"label_names": [str(i) for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(classes))
    patch = "import torchvision.datasets.cifar as c\nc.check_integrity = lambda *a, **k: True\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    return environment | {"DATA": str(tmp_path / "data")}


def run(environment, *words):
    done = python(*words, env=environment)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("ranks", "precision"), [(1, "fp32"), (2, "fp32"), (2, "fp16")])
@pytest.mark.product(every=3)
def test_colossal_booster(cifar, ranks, precision):
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    script = [str(HERE / "colossal_booster.py"), precision]
    said = run(cifar, *torchrun, f"--nproc_per_node={ranks}", *script)
    losses = re.findall(r"iteration (\d) loss ([\d.]+) norm (\S+)", said)
    assert [int(index) for index, _, _ in losses] == [0, 1, 2, 3]
    # Under fp16 the first steps may overflow: they say inf or nan, and are skipped.
    assert not any(float(norm) <= 0.1 for _, _, norm in losses)
    assert precision == "fp16" or all(math.isfinite(float(norm)) for _, _, norm in losses)
    sums = re.findall(r"rank \d weights (\S+)", said)
    assert len(sums) == ranks
    assert len(set(sums)) == 1, "replicas drifted apart"


def test_composer_functional(environment):
    said = run(environment, str(HERE / "composer_functional.py"))
    for kind in ("norm", "value", "adaptive"):
        first, second = map(float, re.findall(rf"{kind} epoch \d: ([\d.]+)", said))
        assert second < first


def test_composer_trainer(environment):
    said = run(environment, str(HERE / "composer_trainer.py"))
    assert float(re.search(r"accuracy ([\d.]+)", said)[1]) > 0.5
    assert 0 < float(re.search(r"clipped ([\d.]+)", said)[1]) <= 1
