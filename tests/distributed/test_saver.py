"""Several ranks save together, at the same step, and stop together, under every plugin."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner import CheckpointSaver
from runner.checkpoint import content, folder
from runner.config.duration import Duration
from runner.config.problem import Stopped
from runner.train import trainer as training_loop
from tests.distributed.cases import FAMILIES, Case, trainer
from tests.ranks import run_ranks

STEPS = 8


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def made(model: str, plugin: str | None, **options: Any) -> Any:
    case = Case(model, "L2", accumulation=2, steps=STEPS)
    training = trainer(case, plugin, optimizer=adam, **options)
    training.eval_interval = Duration(1, "ba")
    return training


def steps_of(path: Path) -> list[int]:
    return [int(one.name.removeprefix("step_")) for one in reversed(folder.found(path))]


def saved_and_stopped(model: str, plugin: str, path: Path, asynchronous: bool) -> Any:
    """Train with a checkpoint every second step; the last rank is asked to stop in step five."""
    saver = CheckpointSaver(path, "2ba", best="eval/loss", asynchronous=asynchronous)
    training = made(model, plugin, saver=saver)
    last = dist.get_rank() == dist.get_world_size() - 1
    training._between.stop = lambda: 10 if last and training.state.progress.step == 4 else 0
    try:
        training.fit()
    except Stopped as stopped:
        return {
            "signal": stopped.signal,
            "step": training.state.progress.step,
            "weights": training.booster.state_dict(training.model),
        }
    return None


def continued(model: str, plugin: str, path: Path) -> Any:
    """Load the newest checkpoint, and then the final weights of a whole run."""
    training = made(model, plugin, saver=CheckpointSaver(path, "2ba", best="eval/loss"))
    training.load(folder.found(path)[0])
    at = training.booster.state_dict(training.model)
    training.fit()
    end = training.booster.state_dict(training.model)
    other = made(model, plugin)
    content.load_weights(other, path / "final")
    return {"at": at, "end": end, "final": other.booster.state_dict(other.model)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=8)
def test_all_ranks_save_and_stop_at_the_same_step(plugin, world, asynchronous, tmp_path):
    model = FAMILIES[plugin, world]
    found = run_ranks(saved_and_stopped, world, model, plugin, tmp_path, asynchronous)
    assert [(one["signal"], one["step"]) for one in found] == [(10, 5)] * world
    assert steps_of(tmp_path)[-2:] == [4, 5]
    whole = dict(folder.whole(tmp_path))
    assert len(whole) == len(steps_of(tmp_path))
    assert {about["world_size"] for about in whole.values()} == {world}
    first, *_ = run_ranks(continued, world, model, plugin, tmp_path)
    torch.testing.assert_close(first["at"], found[0]["weights"], rtol=0, atol=0)
    torch.testing.assert_close(first["final"], first["end"], rtol=0, atol=0)


def due_by_minutes(plugin: str, path: Path) -> list[int]:
    """Only the clock of the first rank counts, whatever another one shows."""
    saver = CheckpointSaver(path, "1min", keep=9)
    training = made("gpt", plugin, saver=saver)
    rank = dist.get_rank()
    saver.overdue = lambda: training.state.progress.step == (2 if rank == 0 else 5)
    training.fit()
    return steps_of(path)


@pytest.mark.parametrize("plugin", ["ddp", "tensor"])
def test_minutes_are_those_of_the_first_rank(plugin, tmp_path):
    assert run_ranks(due_by_minutes, 2, plugin, tmp_path) == [[3], [3]]


def failing(asynchronous: bool, path: Path) -> Any:
    """The first rank fails to complete the second checkpoint, some time after the others wrote."""
    complete = folder.complete

    def full(part: Path, about: dict[str, Any]) -> Path:
        if about["step"] == 4:
            time.sleep(0.3)
            raise OSError(errno.ENOSPC, "No space left on device")
        return complete(part, about)

    folder.complete = full
    training = made("gpt", "ddp", saver=CheckpointSaver(path, "2ba", asynchronous=asynchronous))
    try:
        training.fit()
    except OSError as error:
        return training.state.progress.step, error.errno, str(error)
    return None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_of_one_rank_is_raised_on_all_at_the_same_step(asynchronous, tmp_path):
    one, other = run_ranks(failing, 2, asynchronous, tmp_path)
    assert one == other
    step, number, message = one
    assert step in ((5, 6) if asynchronous else (4,))
    assert number == errno.ENOSPC
    assert "is full after" in message
    assert [at.name for at in tmp_path.iterdir()] == ["step_000000002"]


def collectives(plugin: str, path: Path) -> list[tuple[str, ...]]:
    """Collectives that count the samples of each step and agree on what to do after it."""
    calls: list[str] = []
    found = []

    def recording(name: str) -> None:
        real = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return real(*args, **options)

        setattr(dist, name, call)

    def kept(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.clear()
            result = real(*args)
            found.append(tuple(calls))
            return result

        return call

    for name in (
        "all_reduce",
        "all_gather",
        "all_to_all_single",
        "all_gather_object",
        "broadcast_object_list",
    ):
        recording(name)
    training = made("gpt", plugin, saver=CheckpointSaver(path, "100ba", save_final=False))
    training_loop.count = kept(training_loop.count)
    training._between.act = kept(training._between.act)
    training.fit()
    return found


@pytest.mark.parametrize(
    ("plugin", "world"), [("ddp", 2), ("fsdp", 2), ("zero2", 2), ("tensor", 2), ("hybrid_zero1", 4)]
)
def test_a_step_has_one_collective_on_the_host_and_none_for_checkpoints(plugin, world, tmp_path):
    for found in run_ranks(collectives, world, plugin, tmp_path):
        assert found == [("all_to_all_single",), ()] * STEPS
