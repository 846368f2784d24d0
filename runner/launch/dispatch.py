"""Dispatch a run to this process, to local ranks, or to ranks that torchrun or Slurm started."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.config.check import parse
from runner.config.schema import RunConfig
from runner.config.sizes import joined_ranks
from runner.launch.local_ranks import Work, train_on_local_ranks
from runner.run_folder import files
from runner.run_folder.rows import JsonlSink
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.sinks.terminal import is_watched


def train(
    config: RunConfig,
    plain: dict[str, Any],
    folder: Path,
    shown: Sequence[Sink],
    work: Work | None = None,
) -> dict[str, Any]:
    """Train in the way that ``config`` and the environment ask for.

    Args:
        config: the configuration.
        plain: the same as plain containers.
        folder: for rows and the log of ranks.
        shown: where rows go besides.
        work: what each rank does, a function of a module that ranks can import; a run's training by
            default.

    Returns:
        What the first rank's work returned: the summary of a run.
    """
    from runner.launch.process_group import launch_from_torch, leave, stand_alone
    from runner.train import build
    from runner.train.job import execute

    joined = joined_ranks()
    if is_watched(sys.stderr) and build.device_of(config.device).type == "cpu":
        plain = {**plain, "log": {**plain["log"], "flush": 1}}
        config = parse(plain)
    if joined is None and build.ranks_of(config) > 1:
        return train_on_local_ranks(plain, folder, build.ranks_of(config), shown, work)
    try:
        if joined is not None and config.plugin.name != "single":
            import torch.distributed as dist

            launch_from_torch(verbose=False, timeout=config.launch.timeout)
            dist.broadcast_object_list([plain, folder.absolute()], src=0)
        elif config.plugin.name != "single":
            stand_alone()
        return (work or execute)(config, [JsonlSink(folder / files.ROWS), *shown])
    finally:
        leave()


def join(work: Work | None = None) -> int:
    """Be one of the ranks that torchrun or Slurm started, but the first: it sends what to run.

    Args:
        work: what each rank does; a run's training by default.

    Returns:
        The exit code.
    """
    import torch.distributed as dist

    from runner.launch.process_group import launch_from_torch, leave
    from runner.launch.rank import log_to
    from runner.train.job import execute

    try:
        launch_from_torch(verbose=False)
        sent: list[Any] = [None, None]
        dist.broadcast_object_list(sent, src=0)
        plain, folder = sent
        if folder.is_dir():  # not on another machine without a shared disk
            log_to(folder / files.LOG, dist.get_rank())
        (work or execute)(parse(plain), [])
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        leave()
    return 0
