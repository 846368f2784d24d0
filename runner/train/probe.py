"""Print the first weights after each microbatch, to see which of them changes the model."""

from __future__ import annotations

from collections.abc import Callable

from runner.booster import ModelWrapper
from runner.clip.shard import local


class Probe:
    """Prints elements of the first parameter of a model."""

    def __init__(self, model: ModelWrapper, elements: int, say: Callable[[str], None]) -> None:
        self._model, self._elements, self._say = model, elements, say

    def show(self, step: int, number: int, of: int) -> None:
        """Print the probe after microbatch ``number`` of ``of`` in a step."""
        if not self._elements:
            return
        first = local(next(self._model.unwrap().parameters()).detach()).flatten()[: self._elements]
        values = " ".join(f"{x:+.6f}" for x in first.tolist())
        self._say(f"step {step} microbatch {number}/{of}: {values}")
