"""Plugin ``single``: one process holds everything."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from runner.booster.plugin.base import ParallelModel, Plugin
from runner.clip import Layout


class SinglePlugin(Plugin):
    """One process, one device. Other ranks, if there are any, know nothing of this one."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def configure(self, model: nn.Module) -> ParallelModel:
        """The model as it is, whole on this process."""
        return ParallelModel(model, Layout.of_model(model))

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Nothing to hold back."""
        return nullcontext()

    def sum_over_data(self, figures: Sequence[float]) -> list[float]:
        """The figures as they are."""
        return list(figures)


PLUGIN = SinglePlugin
