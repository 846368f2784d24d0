"""Sweeper of Hydra that leaves out jobs that are done: ``hydra/sweeper=clip_runner``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

Waiting = tuple[int, Sequence[str]]
"""Number and overrides of a run."""

# A configuration may hold the options of Hydra's own sweeper. The jobs were made with `params`.
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="clip_runner",
    node={
        "_target_": "hydra_plugins.clip_runner.RecordSweeper",
        "max_batch_size": None,
        "params": None,
    },
    provider="clip_runner",
)


class RecordSweeper(Sweeper):  # type: ignore[misc, unused-ignore]
    """Launch the runs of a sweep that wait."""

    config: DictConfig
    launcher: Launcher
    waiting: ClassVar[Sequence[Waiting]] = ()
    """The runs; the record of the sweep has no secrets, and these overrides may."""

    def __init__(
        self, max_batch_size: int | None = None, params: dict[str, str] | None = None
    ) -> None:
        self.max_batch_size = max_batch_size

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Make the launcher."""
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Launch the runs that wait, and return what their jobs returned."""
        from runner.compose.record import as_yaml, unresolved_composition
        from runner.run_folder import files
        from runner.run_folder.strict_json import write_text

        folder = Path(self.config.hydra.sweep.dir)
        write_text(folder / files.MULTIRUN, as_yaml(unresolved_composition(self.config)))
        returned = []
        for batch in _batches(self.waiting, self.max_batch_size):
            results = self.launcher.launch([words for _, words in batch], batch[0][0])
            returned.append([result.return_value for result in results])  # raises what a job raised
        return returned


def _batches(waiting: Sequence[Waiting], largest: int | None) -> Iterator[list[Waiting]]:
    """Yield the runs of each launch: Hydra numbers the runs of one launch without a gap."""
    batch: list[Waiting] = list(waiting[:1])
    for before, job in pairwise(waiting):
        if job[0] != before[0] + 1 or len(batch) == largest:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch
