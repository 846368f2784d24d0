"""Public faults by the tools' own calls: versions that have them, each in a folder of its own."""

import importlib
import os
import sys

import pytest

from tests.check.calls import PINNED
from tests.process import python
from tests.ranks import run_ranks


def reported(folder, body):
    """What a script reports on this rank, with the packages of a folder."""
    mine = set(os.listdir(folder))
    for name in list(sys.modules):
        if name.partition(".")[0] in mine:
            del sys.modules[name]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return body()


@pytest.mark.slow
@pytest.mark.parametrize("body", PINNED, ids=lambda body: body.__name__)
def test_the_own_call_of_a_tool_is_wrong_and_ours_is_right(body, tmp_path):
    folder = str(tmp_path / "packages")
    options = ["-q", "--no-deps", "--no-build-isolation", "--target", folder]
    python("-m", "pip", "install", *options, *PINNED[body])
    text, words = run_ranks(reported, 2, folder, body, timeout=300)[0]
    assert not [word for word in words.split("|") if word not in text], text
