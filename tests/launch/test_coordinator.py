"""What a script asks about its ranks, under Colossal-AI's names."""

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
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert get_current_device().type == wanted


def asked(folder):
    coordinator, first = DistCoordinator(), dist.get_rank() == 0
    file = folder / "file"
    with coordinator.priority_execution():
        seen = file.exists()
        file.touch()
    failed = pytest.raises(OSError, match="no space") if first else nullcontext()
    with failed, coordinator.priority_execution():  # the second rank is not left waiting
        if first:
            raise OSError("no space")
    with redirect_stdout(StringIO()) as said:
        coordinator.print_on_master("of the first rank")
    return coordinator.world_size, coordinator.is_master(), seen, said.getvalue()


def test_the_master_goes_first_and_speaks(tmp_path):
    first, second = run_ranks(asked, 2, tmp_path)
    assert first == (2, True, False, "of the first rank\n")
    assert second == (2, False, True, "")
