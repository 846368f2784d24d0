"""Gradients of a model that is split over ranks are read as the plain tensors of each rank."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from runner.clip import Layout, ParamShard, Units
from tests.distributed.by_hand import Clip, Loop
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

CLIPS: list[Clip] = [("norm", 0.05, 2.0), ("norm", 0.01, float("inf")), ("value", 0.003, 2.0)]
CLIPS.append(("adaptive", 0.02, 2.0))


class Dispatched(TorchDispatchMode):
    """Records the operations that a DTensor takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def dispatched(plugins: list[str]) -> dict[tuple[str, Clip], set[str]]:
    found = {}
    for plugin in plugins:
        for clip in CLIPS:
            loop = Loop(plugin, make("gpt", torch.float32))
            loop.backward(*batch_for("gpt", torch.float32))
            loop.optimizer.unscale()
            with Dispatched() as seen:
                loop.clip(clip)
            assert any(isinstance(shard.param, DTensor) for shard in loop.layout.shards)
            found[plugin, clip] = seen.found
    return found


@pytest.mark.parametrize(("world", "plugins"), [(2, ["fsdp", "tensor"]), (4, ["hybrid_fsdp_tp"])])
def test_clipping_runs_no_operation_on_dtensors(world, plugins):
    for found in run_ranks(dispatched, world, plugins):
        assert not {key: names for key, names in found.items() if names}


def gradients_of_odd_shards() -> dict[str, Any]:
    """What a layout says of gradients that are absent, empty, plain, or split; and to_local()."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_rank()

    def parameter(rows: int, placement: Any) -> torch.nn.Parameter:
        shard = placement == Shard(0)
        size = (rows + 1 - rank) // 2 if shard else rows
        made = DTensor.from_local(
            torch.ones(size, 3), mesh, [placement], run_check=False, shape=(rows, 3), stride=(3, 1)
        )
        return torch.nn.Parameter(made)

    names = {"rows": 4, "few": 1, "absent": 5}
    params = {name: parameter(rows, Shard(0)) for name, rows in names.items()}
    params["copied"] = parameter(2, Replicate())
    params["plain"] = torch.nn.Parameter(torch.ones(2, 3))
    for name, each in params.items():
        if name != "absent":
            each.grad = torch.full_like(each, len(name))
    layout = Layout([ParamShard(name, p, Units((1,))) for name, p in params.items()])
    shards, gradients = layout.gradients()
    again, _ = layout.gradients()
    whole = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in params.items()
        if p.grad is not None
    }
    del layout.shards[-1]  # without a plain one among them
    split = [shard.name for shard in layout.gradients()[0]]
    layout.shards.pop(2)  # all of them have a gradient, of which one is empty
    present = [shard.name for shard in layout.gradients()[0]]
    params["copied"].grad = DTensor.from_local(torch.ones(2, 3), mesh, [Partial()])
    try:
        layout.gradients()
        refused = ""
    except TypeError as error:
        refused = str(error)
    return {
        "found": {shard.name: g for shard, g in zip(shards, gradients, strict=True)},
        "kinds": {type(gradient) for gradient in gradients},
        "same": shards is again,
        "whole": whole,
        "split": split,
        "present": present,
        "refused": refused,
    }


def test_absent_empty_and_plain_gradients_among_split_ones():
    first, second = run_ranks(gradients_of_odd_shards, 2)
    assert list(first["found"]) == ["rows", "few", "copied", "plain"]
    assert list(second["found"]) == ["rows", "copied", "plain"]
    assert first["split"] == first["present"] == ["rows", "few", "copied"]
    assert second["split"] == second["present"] == ["rows", "copied"]
    for rank in (first, second):
        assert rank["kinds"] == {torch.Tensor}
        assert rank["same"]
        assert rank["refused"].startswith("copied has a gradient that its ranks have not added up")
        for name in ("copied", "plain"):
            assert torch.equal(rank["found"][name], rank["whole"][name])
    both = torch.cat([first["found"]["rows"], second["found"]["rows"]])
    assert torch.equal(both, first["whole"]["rows"])
    assert torch.equal(first["found"]["few"], first["whole"]["few"])
