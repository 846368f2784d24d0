"""Secrets, and values of the environment, are in no file that a command leaves."""

import secrets
from pathlib import Path

import pytest
import yaml

from runner.models.cnn import DigitsCNN
from tests.launch.ends import read

pytestmark = pytest.mark.xdist_group("finished")


class Secretive(DigitsCNN):
    """DigitsCNN with arguments that a user would not want to see in a record."""

    def __init__(self, num_classes: int = 10, width: int = 32, **others: object):
        super().__init__(num_classes=num_classes, width=width)
        self.others = others

    def forward(self, images):
        if "***" in self.others.values():
            raise RuntimeError("a mask is no secret")
        return super().forward(images)


RECORDED = {
    "direct": "${oc.env:HF_TOKEN}",
    "longer": "https://user:${oc.env:PART}@host/x",
    "password": "${oc.env:UNDER_KEY}",
    "api_key": "***",
}
"""How the overrides of :class:`Planted` are recorded."""


class Planted:
    """Secrets in the environment and in overrides, and the overrides that use them."""

    def __init__(self) -> None:
        names = ("HF_TOKEN", "PART", "UNDER_KEY")
        self.variables = {name: secrets.token_hex(12) for name in names}
        typed = secrets.token_hex(12)
        self.all = [*self.variables.values(), typed]
        self.words = [
            "model._target_=tests.launch.test_secrets.Secretive",
            "+model.direct='${oc.env:HF_TOKEN}'",
            "+model.longer='https://user:${oc.env:PART}@host/x'",
            "+model.password='${oc.env:UNDER_KEY}'",
            f"+model.api_key={typed}",
        ]


def leaks(planted, folder: Path):
    """Files in which a planted secret stands."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [one for one in files if any(each.encode() in one.read_bytes() for each in planted.all)]


def test_a_run_leaves_no_secret(single):
    folder = single.folder
    assert leaks(single.planted, folder) == []
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model.items() >= RECORDED.items()
    composed, overrides = (
        yaml.safe_load((folder / ".hydra" / f"{name}.yaml").read_text())
        for name in ("config", "overrides")
    )
    assert composed["model"].items() >= RECORDED.items()
    assert composed["clip"]["threshold"] == 0.25
    assert "+model.api_key=***" in overrides
    assert read(folder / "checkpoints" / "final", "manifest.json")["config"]["model"] == model
