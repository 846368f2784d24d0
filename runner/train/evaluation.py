"""Evaluate the weights of a checkpoint on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.checkpoint.content import load_weights
from runner.config.schema import RunConfig
from runner.parallel.collectives import on_first
from runner.telemetry.sinks.sink import Sink
from runner.train.job import make_trainer


def execute(config: RunConfig, sinks: Sequence[Sink], *, checkpoint: Path | None) -> dict[str, Any]:
    """Evaluate a checkpoint on the held-out data; every rank has to call this."""
    for sink in sinks:
        sink.close(None, 0)
    trainer = make_trainer(config, ())
    found = on_first(lambda: checkpoint)
    assert found is not None
    load_weights(trainer, found, verify=False)  # the first rank has
    held_out = trainer.eval_dataloader
    metrics = {} if held_out is None else trainer.passes.evaluate(held_out)
    return {"metrics": metrics, "world_size": trainer.plugin.world_size}
