"""Find the largest microbatch that fits the device, for ``accumulation=auto``.

Processes of their own take the first steps of a run, and end: the run that follows has the random
numbers and the memory of a run that never searched. A rank that runs out of memory ends the others.
"""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.checkpoint.folder import manifest_of
from runner.config.masking import remembered
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import Failure, tells_of_memory
from runner.launch.resume import Start
from runner.launch.train import train_on_ranks
from runner.run_folder import keys


def in_microbatches(config: RunConfig, steps: int) -> RunConfig:
    """Return a configuration whose steps of ``data.batch_size`` samples have ``steps`` parts."""
    data = config.data.model_copy(update={"batch_size": config.data.batch_size // steps})
    accumulation = config.accumulation.model_copy(update={"steps": steps})
    return config.model_copy(update={"data": data, "accumulation": accumulation})


def steps_before(config: RunConfig, start: Start) -> int | None:
    """Return the microbatches that the run which goes on has found; None if it has not."""
    steps = recorded_steps(config, start.former)
    if steps is None and start.checkpoint is not None:
        steps = recorded_steps(config, manifest_of(start.checkpoint))
    return steps


def recorded_steps(config: RunConfig, record: Mapping[str, Any]) -> int | None:
    """Return the microbatches that a status or a manifest has; None if it has none that fit."""
    steps = record.get(keys.ACCUMULATION_STEPS)
    divides = type(steps) is int and steps > 0 and config.data.batch_size % steps == 0
    return steps if divides else None


def find_steps(config: RunConfig) -> int:
    """Return the fewest microbatches of a step that fit the device, by trying.

    Raises:
        Failure: not even a microbatch of one sample fits, or steps fail for another reason.
    """
    return fewest(config.data.batch_size, lambda steps: _fits(in_microbatches(config, steps)))


def fewest(batch_size: int, fits: Callable[[int], bool]) -> int:
    """Return the fewest equal parts of a batch that fit; fewer than those that fit do not."""
    candidates = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    place = bisect.bisect_left(candidates, True, key=fits)
    if place == len(candidates):
        text = "not even a microbatch of one sample fits the memory of the device: shard the model "
        raise Failure(text + "over more ranks (plugin=fsdp), or activation_checkpointing=blocks")
    return candidates[place]


def _fits(config: RunConfig) -> bool:
    """Return whether ranks of their own take the first steps without running out of memory."""
    with signals.deferred():
        from runner.launch.rank import Task
        from runner.train import build
        from runner.train.run import try_steps

    launch = config.launch.model_copy(update={"max_restarts": 0})
    log = config.log.model_copy(update={"interval": 1})  # what rows need is measured in each step
    config = config.model_copy(update={"launch": launch, "log": log})
    with tempfile.TemporaryDirectory(prefix="clip-runner-") as scratch:
        task = Task(
            config,
            Path(scratch),
            try_steps,
            handled=tuple(signals.handled()),
            secrets=remembered(),
        )
        try:
            train_on_ranks(task, build.ranks_of(config), [])
        except Failure as failure:
            if tells_of_memory(failure):
                return False
            raise
    return True
