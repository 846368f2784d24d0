"""What scripts ask about their ranks, telling a lost rank from an error, and the fork server."""

import os
import socket
from contextlib import nullcontext, redirect_stdout
from functools import cache
from io import StringIO
from unittest.mock import DEFAULT, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import RendezvousParameters

from runner import DistCoordinator, get_current_device, launch_from_torch
from runner.config.environment import join_slurm_step
from runner.config.problem import Problem, RefusedOnAllRanks, RequestError
from runner.gradients.transfer import start_gather
from runner.launch import agreement
from runner.launch.failure import is_lost_peer
from runner.launch.rank import join
from runner.launch.rendezvous import OneMachine
from tests.launch.ends import started
from tests.process import ROOT, python, wait_for
from tests.ranks import run_ranks


def lose_the_other(begun):
    if dist.get_rank():
        wait_for(begun.exists)
        os._exit(0)
    wait = start_gather(torch.ones(1), None)
    begun.touch()
    with pytest.raises(RuntimeError) as lost:
        wait()
    assert is_lost_peer(lost.value)
    assert not is_lost_peer(RuntimeError("in a model"))


def test_a_rank_that_waits_for_an_exchange_knows_that_it_lost_another(tmp_path):
    with pytest.raises(AssertionError, match=r"^rank 1 died$"):
        run_ranks(lose_the_other, 2, tmp_path / "begun")


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RuntimeError, match=f"^MASTER_PORT={port} is in use"):
            launch_from_torch()


def wait_for_nobody(folder):
    environment = {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": ""}
    with patch.object(dist, "init_process_group"), patch.dict(os.environ, environment):
        launch_from_torch(verbose=False, timeout=1)
    group = init_device_mesh("cpu", (2, 2)).get_group(1)
    given_up = folder / str(dist.get_rank() // 2)
    if dist.get_rank() % 2:
        return wait_for(given_up.exists)
    with pytest.raises(RuntimeError, match="imed out"):
        dist.all_reduce(torch.ones(1), group=group)
    return given_up.touch()


def test_the_groups_of_a_mesh_have_the_time_limit_of_the_ranks(tmp_path):
    run_ranks(wait_for_nobody, 4, tmp_path)


def asked(folder):
    coordinator = DistCoordinator()
    first = dist.get_rank() == 0
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


def test_the_master_of_a_coordinator_goes_first(tmp_path):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert get_current_device().type == kind
    first, second = run_ranks(asked, 2, tmp_path)
    assert first == (2, True, False, "of the first rank\n")
    assert second == (2, False, True, "")


STEP = {  # of srun --nodes=2 --ntasks=3, in its last task
    "SLURM_JOB_ID": "14990",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "localhost,gpu[07-09,11]",
    "SLURM_CPUS_ON_NODE": "1",
}
RANK = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": str(15000 + (14990 + 3 * 1009) % 15000),
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, RANK),
        (
            {"MASTER_ADDR": "other", "MASTER_PORT": "7"},
            {"MASTER_ADDR": "other", "MASTER_PORT": "7"},
        ),
        ({"SLURM_STEP_NODELIST": "gpu[07-09,11]-b,c"}, {"MASTER_ADDR": "gpu07-b"}),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, {"LOCAL_WORLD_SIZE": "3"}),
        ({"SLURM_STEP_NUM_NODES": "1"}, {"MASTER_ADDR": "127.0.0.1", "GROUP_WORLD_SIZE": "1"}),
        # What starts its ranks itself: torchrun, a step of one task, a batch script.
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": None}),
        ({"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": None}),
        ({"SLURM_STEP_NUM_TASKS": ""}, {"RANK": None}),
        ({"SLURM_PROCID": ""}, {"RANK": None}),
    ],
)
def test_a_task_of_srun_is_a_rank(changed, expected):
    with patch.dict(os.environ, STEP | changed, clear=True):
        join_slurm_step()
        assert {name: os.environ.get(name) for name in expected} == expected


def compare_requests():
    rank = dist.get_rank()
    request = {"seed": min(rank, 1), "clip": {"threshold": 1.0}, "tracker": {"group": rank}}
    joined = patch.multiple(agreement, launch_from_torch=DEFAULT, leave=DEFAULT)
    described = patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": "3"})
    with joined, described:
        agreement.require_same_request({**request, "seed": 1}, timeout=60)  # another group is free
        with pytest.raises(RefusedOnAllRanks) as differing:
            agreement.require_same_request(request, timeout=60)
        if rank < 2:
            with pytest.raises(RefusedOnAllRanks) as refused:
                agreement.require_same_request({"seed": 1}, timeout=60)
            return str(differing.value), str(refused.value)
        wrong = RequestError([Problem("sed", 1, "unknown key"), Problem("token", "abc1", "no")])
        with patch.object(dist, "is_initialized", return_value=False):
            return str(differing.value), str(agreement.refused_on_all_ranks(wrong))


@cache
def compared_requests():
    """The messages, which are the same on all ranks."""
    [(differing, refused)] = {*run_ranks(compare_requests, 3)}
    return differing, refused


@pytest.mark.xdist_group("requests of ranks")
def test_ranks_refuse_different_requests_by_one_message():
    differing, _ = compared_requests()
    assert "(1 problem)" in differing
    assert "seed=0  on rank 0, and 1 on rank 1" in differing


@pytest.mark.xdist_group("requests of ranks")
def test_all_ranks_refuse_a_wrong_request_of_one_rank():
    _, refused = compared_requests()
    assert "(2 problems)" in refused
    assert "sed=1" in refused
    assert "unknown key (on rank 2 of 3)" in refused
    assert "token=***" in refused


def test_a_rank_that_waits_for_the_others_answers_a_signal(environment):
    with socket.create_server(("127.0.0.1", 0)) as first:  # the first rank, which says nothing
        first.settimeout(600)
        described = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        described |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first.getsockname()[1])}
        words = ["plugin=ddp", "tracker=none", "shutdown.timeout=500"]
        with started(environment | described, words) as rank:
            connection, _ = first.accept()
            rank.process.terminate()
            with connection:
                rank.ends(143)
    assert "it had not ended" not in rank.printed


# The calls by which a process learns of a GPU or uses it; after any of them its children cannot.
WITHOUT_A_GPU = """
import os, threading
import torch, torch.cuda

def touched(*args, **kwargs):
    raise SystemExit("a GPU was asked for")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
torch._C._cuda_getDeviceCount = torch._C._cuda_init = touched

import runner.launch.preloaded
assert threading.active_count() == 1, threading.enumerate()
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_the_fork_server_holds_nothing_that_its_forks_lose(environment):
    """A driver that was asked, and threads, do not exist in the processes that it forks."""
    python("-c", WITHOUT_A_GPU, env=environment, cwd=ROOT)


def test_the_store_of_local_ranks_listens_before_they_start():
    asked = RendezvousParameters("one machine", "", "local", min_nodes=1, max_nodes=1)
    meeting = OneMachine(asked).next_rendezvous()
    place = meeting.bootstrap_store_info
    # Another program may take a port that is only reserved.
    with socket.create_connection((place.master_addr, place.master_port), timeout=60):
        pass
