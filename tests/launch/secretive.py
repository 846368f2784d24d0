"""A model that takes secrets."""

import secrets

import torch

from runner.models.cnn import DigitsCNN


class Secretive(DigitsCNN):
    """DigitsCNN with arguments that a user would not want to see in a record."""

    def __init__(self, num_classes: int = 10, width: int = 32, **others: object):
        super().__init__(num_classes=num_classes, width=width)
        self.others = others

    def forward(self, images: torch.Tensor) -> torch.Tensor:
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
            "model._target_=tests.launch.secretive.Secretive",
            "+model.direct='${oc.env:HF_TOKEN}'",
            "+model.longer='https://user:${oc.env:PART}@host/x'",
            "+model.password='${oc.env:UNDER_KEY}'",
            f"+model.api_key={typed}",
        ]
