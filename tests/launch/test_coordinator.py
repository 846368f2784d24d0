"""What a script asks about its ranks, under Colossal-AI's names."""

import os
import time
from contextlib import nullcontext, redirect_stdout
from io import StringIO

import pytest
import torch
import torch.distributed as dist

from runner import DistCoordinator, get_current_device
from tests.ranks import run_ranks


def test_a_coordinator_needs_ranks():
    with pytest.raises(RuntimeError, match=r"launch_from_torch\(\) first"):
        DistCoordinator()


def test_the_device_is_the_cpu_where_there_is_no_gpu():
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert get_current_device().type == wanted


def asked(folder):
    rank = dist.get_rank()
    os.environ.pop("LOCAL_RANK", None)
    coordinator = DistCoordinator()
    unset = coordinator.local_rank
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not set"):
        coordinator.is_node_master()
    with pytest.raises(ValueError, match="executor_rank is 0 to 1, not 2"):
        coordinator.priority_execution(2).__enter__()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(1 - rank)}
    alone = dist.new_group([1])

    # The executor is slow: without waiting, the other rank would not find its file.
    seen = []
    for executor in (0, 1):
        file = folder / f"{executor}"
        with coordinator.priority_execution(executor):
            seen.append(file.exists())
            if rank == executor:
                time.sleep(0.3)
                file.touch()
    # An executor that fails does not leave the others waiting.
    failed = pytest.raises(OSError, match="no space") if rank == 0 else nullcontext()
    with failed, coordinator.priority_execution():
        if rank == 0:
            raise OSError("no space")

    late = folder / "late"
    if rank == 0:
        time.sleep(0.3)
        late.touch()
    coordinator.block_all()
    return {
        "numbers": (coordinator.rank, coordinator.world_size, unset, coordinator.local_rank),
        "master": coordinator.is_master(),
        "last": coordinator.is_last_process(),
        "node_master": coordinator.is_node_master(),
        "of_group": coordinator.is_master(alone) if rank == 1 else None,
        "seen": seen,
        "after_the_barrier": late.exists(),
        "only": only(coordinator),
        "printed": printed(coordinator),
        "left": left(coordinator),
    }


def printed(coordinator):
    with redirect_stdout(StringIO()) as said:
        coordinator.print_on_master("of the first rank")
        coordinator.print_on_node_master("of the machine's first rank")
    return said.getvalue()


def left(coordinator):
    coordinator.destroy()
    return not dist.is_initialized()


def only(coordinator):
    @coordinator.on_master_only()
    def named(first, *, second):
        """Add."""
        return first + second

    return named.__name__, named.__doc__, named(1, second=2)


def test_two_ranks_know_who_they_are_and_wait_for_each_other(tmp_path):
    first, second = run_ranks(asked, 2, tmp_path)
    assert first["numbers"] == (0, 2, -1, 1)
    assert second["numbers"] == (1, 2, -1, 0)
    assert (first["master"], second["master"]) == (True, False)
    assert (first["last"], second["last"]) == (False, True)
    assert (first["node_master"], second["node_master"]) == (False, True)
    assert second["of_group"] is True
    assert (first["seen"], second["seen"]) == ([False, True], [True, False])
    assert second["after_the_barrier"]
    assert first["only"] == ("named", "Add.", 3)
    assert second["only"] == ("named", "Add.", None)
    assert first["printed"] == "of the first rank\n"
    assert second["printed"] == "of the machine's first rank\n"
    assert first["left"]
    assert second["left"]
