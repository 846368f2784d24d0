"""A process that trains on a CPU keeps the memory that it frees, if its user chose nothing else."""

import sys

import pytest

from tests.process import python

# Ten steps that allocate as much as the steps before: how often each had a page mapped.
FAULTS = """
import os, resource, statistics, torch
from runner.launch.process_group import keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def median(device):
    keep_freed_memory(device)
    counts = []
    for _ in range(13):
        before = faults()
        held = torch.ones(2**24), torch.ones(2**22)  # 80 MiB, more than glibc keeps by itself
        del held
        counts.append(faults() - before)
    return statistics.median(counts[3:])
given_back = [median("cuda")]
os.environ["MALLOC_ARENA_MAX"] = "2"
given_back.append(median("cpu"))
del os.environ["MALLOC_ARENA_MAX"]
print(*given_back, median("cpu"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_used_again_unless_the_user_chose():
    *others, kept = map(float, python("-c", FAULTS).stdout.split())
    assert kept * 10 < min(others)
