"""A model that takes secrets, and may fail with a message that quotes them."""

import logging
import secrets

import torch

from runner.models.cnn import DigitsCNN


class Secretive(DigitsCNN):
    """DigitsCNN with arguments that a user would not want to see in a record."""

    def __init__(self, num_classes: int, width: int, fails: bool = False, **others: object):
        super().__init__(num_classes=num_classes, width=width)
        self.fails, self.others = fails, others

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.device.type != "meta":
            logging.getLogger("model").warning("loaded with %s", self.others)
            if "***" in self.others.values():
                raise RuntimeError("a mask is no secret")
            if self.fails:
                raise RuntimeError(f"access denied: {self.others}")
        return super().forward(images)


RECORDED = {
    "direct": "${oc.env:HF_TOKEN}",
    "plain": "${oc.env:PLAIN_VALUE}",
    "longer": "https://user:${oc.env:PART}@host/x",
    "password": "${oc.env:UNDER_KEY}",
    "access_token": "${oc.env:NOT_SET,***}",
    "api_key": "***",
    "copied": "Bearer ***",
    "options": {"credential": "***", "size": 3},
}
"""How the overrides of :class:`Planted` are recorded."""


class Planted:
    """Secrets in the environment and in overrides, and the overrides that use them."""

    def __init__(self) -> None:
        names = ("HF_TOKEN", "PLAIN_VALUE", "PART", "UNDER_KEY")
        self.variables = {name: secrets.token_hex(12) for name in names}
        self.typed, default, nested = (secrets.token_hex(12) for _ in range(3))
        self.all = [*self.variables.values(), self.typed, default, nested]
        self.words = [
            "model._target_=tests.launch.secretive.Secretive",
            "+model.direct='${oc.env:HF_TOKEN}'",
            "+model.plain='${oc.env:PLAIN_VALUE}'",
            "+model.longer='https://user:${oc.env:PART}@host/x'",
            "+model.password='${oc.env:UNDER_KEY}'",
            f"+model.access_token='${{oc.env:NOT_SET,{default}}}'",
            f"+model.api_key={self.typed}",
            "+model.copied='Bearer ${model.api_key}'",
            f"+model.options={{credential:{nested},size:3}}",
            "tracker.tags=['${oc.env:HF_TOKEN}']",
            "hydra.job.env_copy=[PLAIN_VALUE]",
        ]
