"""A model whose runs save what they have loaded from a checkpoint, before their first step."""

from __future__ import annotations

import os
from typing import Any

from runner import Trainer
from runner.models.gpt import GPT

__all__ = ["GPT"]

SAVED = "TESTS_SAVED"
"""Variable with the folder to save to."""

_load = Trainer.load


def _load_and_save(training: Trainer, *args: Any, **options: Any) -> None:
    _load(training, *args, **options)
    training.save(os.environ[SAVED])


if SAVED in os.environ:  # in each rank, which makes the model; not in the process of the tests
    Trainer.load = _load_and_save  # type: ignore[method-assign]
