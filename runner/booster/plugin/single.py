"""Plugin ``single``: one process holds the whole model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from runner.booster.plugin.base import ParallelModel, Plugin
from runner.clip import Layout
from runner.parallel.final_gradients import watch_parameters


class SinglePlugin(Plugin):
    """One process on one device, independent of any other rank."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def configure(self, model: nn.Module) -> ParallelModel:
        """Return the model unchanged."""
        watch = partial(watch_parameters, model)
        return ParallelModel(model, Layout.of_model(model), watch_final=watch)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return an empty context: there is nothing to synchronise."""
        return nullcontext()

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Return the values unchanged."""
        return list(values)


PLUGIN = SinglePlugin
