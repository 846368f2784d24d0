"""Ranks add up the items of a step while its first forward pass runs, and still agree on stops."""

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner import Trainer
from runner.booster.plugin import TorchDDPPlugin, base
from runner.config.problem import Stopped
from tests.distributed.training import network, tokens
from tests.ranks import run_ranks


def stopped_by_rank_1() -> tuple[list[str], int, int]:
    """Order of forward passes and of exchanges on the host; the signal and the last step."""
    events: list[str] = []
    start = base.start_gather

    def starting(row: Tensor, group: Any) -> Callable[[], Tensor]:
        events.append("start")
        wait = start(row, group)

        def waiting() -> Tensor:
            events.append("wait")
            return wait()

        return waiting

    base.start_gather = starting
    model = network("tokens")
    model.register_forward_hook(lambda *_: events.append("forward"))
    plugin = TorchDDPPlugin()
    trainer = Trainer(
        model,
        plugin.prepare_dataloader(tokens(24), 2),
        "9ba",
        accumulation_steps=2,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugin=plugin,
        stop=lambda: signal.SIGTERM if dist.get_rank() and trainer.state.progress.step == 2 else 0,
    )
    try:
        trainer.fit()
    except Stopped as error:
        return events, error.signal, trainer.state.progress.step
    raise AssertionError("the training did not stop")


def test_counts_travel_during_the_forward_pass_and_a_stop_reaches_all_ranks_at_one_step():
    for events, number, step in run_ranks(stopped_by_rank_1, 2):
        assert (number, step) == (signal.SIGTERM, 3)
        # Of three steps of two microbatches each.
        counted = [
            i for i, event in enumerate(events[:-1]) if event + events[i + 1] == "startforward"
        ]
        assert [events[i : i + 4] for i in counted] == [["start", "forward", "wait", "forward"]] * 3
        assert events.count("forward") == 6
