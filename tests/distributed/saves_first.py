"""A model whose runs save what they have loaded from a checkpoint, before their first step."""

from __future__ import annotations

import os
from pathlib import Path

from runner import Trainer
from runner.models.gpt import GPT

__all__ = ["GPT"]

SAVED = "TESTS_SAVED"
"""Variable with the folder to save to."""

_load = Trainer.load


def _load_and_save(training: Trainer, path: Path | str, *, verify: bool = True) -> None:
    _load(training, path, verify=verify)
    training.save(os.environ[SAVED])


Trainer.load = _load_and_save  # type: ignore[method-assign]  # in each rank, which makes the model
