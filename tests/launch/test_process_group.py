"""Joining ranks that somebody else started, and telling a lost one from an error of the user."""

import pytest

from runner import launch_from_torch
from runner.launch.failure import may_be_lost_peer
from runner.launch.rank import join
from tests.process import python

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from runner.clip.exchange import start_gather
from runner.launch.failure import may_be_lost_peer

heard, told = os.pipe()
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
dist.barrier()
if rank:
    os.read(heard, 1)  # the other rank has begun the exchange
    os._exit(0)
wait = start_gather(torch.ones(1), None)
os.write(told, b"x")
try:
    wait()
except RuntimeError as error:
    print(may_be_lost_peer(error), flush=True)
os._exit(0)
"""


def test_a_rank_that_waits_for_an_exchange_knows_that_it_lost_another(tmp_path, environment):
    done = python("-c", SCRIPT, str(tmp_path / "store"), env=environment)
    assert done.stdout.split() == ["True"], done.stderr
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("in a model")
    assert not may_be_lost_peer(raised.value)


def test_a_rank_that_cannot_find_the_others(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"RANK.* not set.*torchrun"):
        launch_from_torch()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert join() == 1
    told = capsys.readouterr().err
    assert told.count("Traceback") == 1
    assert "(MASTER_ADDR, MASTER_PORT not set)" in told
