"""A rank that waits for an exchange tells a lost connection from an error of the user."""

import pytest

from runner.launch.failure import may_be_lost_peer
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


def test_an_error_of_the_user_is_no_lost_rank():
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("in a model")
    assert not may_be_lost_peer(raised.value)
