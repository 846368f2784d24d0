"""Ranks save and stop together; a checkpoint continues to the bit, and under any other layout."""

import errno
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runner import CheckpointSaver
from runner.checkpoint import content, folder
from runner.checkpoint.content import whole_model
from runner.checkpoint.shards import Folder
from runner.config.notation import Duration
from runner.optim.schedulers import CosineAnnealingLR
from runner.train.stop import Stopped
from tests.distributed import cases
from tests.distributed.cases import MODELS, Case, trainer
from tests.distributed.training import Rows
from tests.kept import same
from tests.ranks import run_ranks
from tests.train.test_state import timeless

LIKE = ("zero2", "sequence", "zero_bubble", "moe_zero3")  # as fsdp, tensor, 1f1b and moe
FAMILIES = {
    world: {plugin: model for plugin, model in plugins.items() if plugin not in LIKE}
    for world, plugins in cases.FAMILIES.items()
}
STEPS, STOP = 7, 5
"""An epoch has three steps, so the training stops inside the second epoch."""

Run = tuple[Any, Rows]


def training_of(model: str, plugin: str | None, path: Path, **options: Any) -> Run:
    rows = Rows()
    schedulers = []

    def adam(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        schedulers.append(CosineAnnealingLR(optimizer, STEPS))
        return optimizer

    saver = CheckpointSaver(path, "4ba", best="eval/loss", **options)
    case = Case(model, "percentile", accumulation=2, steps=STEPS)
    training = trainer(case, plugin, optimizer=adam, sinks=[rows], log_flush=3, saver=saver)
    training.state.schedulers = schedulers
    training.eval_interval = Duration(4, "ba")
    return training, rows


def held_state(run: Run) -> dict[str, Any]:
    """Weights of the whole model; rows, rate, counts, history and random state of this rank."""
    training, rows = run
    return {
        "weights": training.booster.state_dict(training.model),
        "rate": [group["lr"] for group in training.optimizer.param_groups],
        "progress": tuple(training.state.progress),
        "history": training.state.mode.state_dict(),
        "random": torch.get_rng_state(),
        "rows": [timeless(row) for row in rows.rows],
    }


def stopped_and_continued(model: str, plugin: str, path: Path, asynchronous: bool) -> Any:
    """A whole training; one in which the last rank is asked to stop; and what continues it."""
    whole = training_of(model, plugin, path / "whole")
    torch.manual_seed(100 + dist.get_rank())
    whole[0].fit()
    end = held_state(whole)

    first = training_of(model, plugin, path, asynchronous=asynchronous)
    torch.manual_seed(100 + dist.get_rank())
    asks = dist.get_rank() == dist.get_world_size() - 1
    first[0].stop = lambda: 10 if asks and first[0].state.progress.step == STOP - 1 else 0
    with pytest.raises(Stopped) as stopped:
        first[0].fit()
    stopped_state = held_state(first)

    later = training_of(model, plugin, path)
    later[0].load(folder.checkpoints_in(path)[0])
    loaded = held_state(later)
    later[0].fit()
    last = held_state(later)
    fresh, _ = training_of(model, plugin, path / "other")
    content.load_weights(fresh, path / "final")
    return {
        "signal": stopped.value.signal,
        "at": (loaded | {"rows": stopped_state["rows"]}, stopped_state),
        "end": (last, end | {"rows": end["rows"][STOP:]}),
        "final": (fresh.booster.state_dict(fresh.model), end["weights"]),
    }


def all_stopped(plugins: dict[str, str], home: Path) -> list[Any]:
    return [
        stopped_and_continued(model, plugin, home / plugin, number % 2 == 0)
        for number, (plugin, model) in enumerate(plugins.items())
    ]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Tensors of the model and the optimizers, put together."""
    stored = Folder(checkpoint).stored.items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored}
    Folder(checkpoint).fill({name: [tensor] for name, tensor in tensors.items()})
    return tensors


def reference(model: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What one process holds when it stops, as torch itself names it, and its final weights."""
    training, _ = training_of(model, None, path)
    step = training._step
    tensors = {}
    network = training.model.unwrap()

    def keeping(*args: Any) -> None:
        step(*args)
        if training.state.progress.step == STOP:
            tensors.update(dict(network.named_parameters()) | dict(network.named_buffers()))
            for name, parameter in network.named_parameters():
                for field, value in training.optimizer.unwrap().state[parameter].items():
                    tensors[f"optimizer/0/{name}/{field}"] = value
            tensors.update({name: t.detach().clone() for name, t in tensors.items()})

    training._step = keeping
    training.fit()
    return tensors, training.booster.state_dict(training.model)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def in_one_process(home):
    """What one process makes of each model."""
    models = {model for plugins in FAMILIES.values() for model in plugins.values()}
    return {model: reference(model, home / "alone" / model) for model in models}


@pytest.fixture(scope="module")
def results(home):
    """By number of ranks and plugin, what each rank found."""
    results = {}
    for world, plugins in FAMILIES.items():
        ranks = run_ranks(all_stopped, world, plugins, home / str(world))
        for number, plugin in enumerate(plugins):
            results[world, plugin] = [rank[number] for rank in ranks]
    return results


@pytest.mark.xdist_group("checkpoints")
def test_all_ranks_stop_at_one_step(home, results):
    for (world, plugin), ranks in results.items():
        assert [rank["signal"] for rank in ranks] == [10] * world, plugin
        whole = dict(folder.whole(home / str(world) / plugin))
        assert home / str(world) / plugin / f"step_{STOP:09d}" in whole, plugin
        assert {about["world_size"] for about in whole.values()} == {world}, plugin


@pytest.mark.xdist_group("checkpoints")
def test_all_ranks_continue_to_the_bit(results):
    for (_, plugin), ranks in results.items():
        for rank in ranks:
            for key in ("at", "end", "final"):
                same(*rank[key], f"{plugin}: {key}")


@pytest.mark.xdist_group("checkpoints")
def test_one_process_without_a_plugin_reads_the_weights_of_all_ranks(home, results):
    for (world, plugin), ranks in results.items():
        checkpoint = home / str(world) / plugin / f"step_{STOP:09d}"
        exported = whole_model(checkpoint, dict(folder.whole(checkpoint.parent))[checkpoint])
        model = FAMILIES[world][plugin]
        MODELS[model]().double().load_state_dict(exported, strict=True)
        same(exported, ranks[0]["at"][1]["weights"])


@pytest.mark.xdist_group("checkpoints")
def test_torch_reads_all_that_ranks_saved(home, results, in_one_process):
    for world, plugin in results:
        model = FAMILIES[world][plugin]
        expected = in_one_process[model][0]
        stored = tensors_of(home / str(world) / plugin / f"step_{STOP:09d}")
        assert stored.keys() == expected.keys() - {"head.weight"} or model != "tied", plugin
        for name, tensor in stored.items():
            message = f"{plugin}: {name}"
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9, msg=message)


OTHERS: dict[int, list[tuple[int, str, str]]] = {
    1: [(2, "1f1b", "single"), (2, "zero1", "single"), (2, "moe", "single")],
    2: [
        *((4, "hsdp", "zero1"), (4, "hybrid_zero1", "1f1b"), (4, "hybrid_fsdp_tp", "tensor")),
        *((2, "ddp", "zero_bubble"), (2, "fsdp", "ddp")),
    ],
    4: [
        *((2, "fsdp", "hsdp"), (2, "tensor", "hybrid_zero1"), (2, "ddp", "hybrid_fsdp_tp")),
        *((2, "moe", "moe_zero3"), (2, "1f1b", "fsdp")),
    ],
}
"""By the number of ranks, which checkpoints they load: ranks and plugin that saved it, theirs."""


def loaded_under(home: Path, asked: list[tuple[int, str, str]]) -> list[Any]:
    """Save what was loaded; return the new checkpoint, and the weights at the end."""
    loaded = []
    for world, saved, plugin in asked:
        path = home / f"{world}_{saved}_{plugin}"
        name = None if plugin == "single" else plugin
        training, _ = training_of(FAMILIES[world][saved], name, path / "saver")
        training.load(home / str(world) / saved / f"step_{STOP:09d}")
        checkpoint = training.save(path)
        training.fit()
        loaded.append((checkpoint, training.booster.state_dict(training.model)))
    return loaded


@cache
def loaded_on(ranks, home):
    """What so many ranks loaded and saved again, and the weights at their end."""
    cases = OTHERS[ranks]
    if ranks == 1:
        return loaded_under(home, cases)
    return run_ranks(loaded_under, ranks, home, cases)[0]


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("ranks", OTHERS)
def test_another_layout_holds_the_same_bits(ranks, home):
    for (world, saved, plugin), (checkpoint, _) in zip(
        OTHERS[ranks], loaded_on(ranks, home), strict=True
    ):
        case = f"{saved} to {plugin}"
        old = home / str(world) / saved / f"step_{STOP:09d}"
        new = Path(checkpoint)
        same(tensors_of(old), tensors_of(new), case)
        states = [torch.load(path / "state.pt", weights_only=True) for path in (old, new)]
        for key in ("clip", "schedulers", "optimizers"):
            same(states[0][key], states[1][key], case)


@pytest.mark.xdist_group("checkpoints")
@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("ranks", OTHERS)
def test_another_layout_continues(ranks, home, in_one_process):
    for (world, saved, plugin), (_, weights) in zip(
        OTHERS[ranks], loaded_on(ranks, home), strict=True
    ):
        expected = in_one_process[FAMILIES[world][saved]][1]
        for name, tensor in weights.items():
            case = f"{saved} to {plugin}: {name}"
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9, msg=case)


# -- the saver on several ranks


def due_by_minutes(path: Path) -> list[int]:
    """Only the clock of the first rank counts, whatever another one shows."""
    saver = CheckpointSaver(path, "1min", keep=9)
    training = trainer(Case("gpt", "L2", steps=STEPS), "ddp", saver=saver)
    due = 2 if dist.get_rank() == 0 else 5
    saver.overdue = lambda: training.state.progress.step == due
    training.fit()
    return [folder.step_of(saved) for saved in folder.checkpoints_in(path)]


def failing(path: Path) -> list[Any]:
    """The first rank fails to complete the second checkpoint, after the others wrote."""
    complete = folder.complete

    def full(part: Path, about: dict[str, Any]) -> Path:
        if about["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return complete(part, about)

    folder.complete = full
    left_behind = []
    for asynchronous in (False, True):
        saver = CheckpointSaver(path / str(asynchronous), "2ba", asynchronous=asynchronous)
        training = trainer(Case("gpt", "L2", steps=STEPS), "ddp", saver=saver)
        with pytest.raises(OSError, match="no checkpoint can be written to") as error:
            training.fit()
        left_behind.append((training.state.progress.step, error.value.errno, str(error.value)))
    folder.complete = complete
    return left_behind


def saver_on_ranks(path: Path) -> Any:
    return due_by_minutes(path / "minutes"), failing(path / "full")


def test_the_saver_on_two_ranks(tmp_path):
    first, second = run_ranks(saver_on_ranks, 2, tmp_path)
    assert first == second
    minutes, failed = first
    assert minutes == [3]
    for asynchronous, (step, number, _) in zip((False, True), failed, strict=True):
        assert step in ((5, 6) if asynchronous else (4,))
        assert number == errno.ENOSPC
        written = (tmp_path / "full" / str(asynchronous)).iterdir()
        assert [path.name for path in written] == ["step_000000002"]
