"""The reasons for which tensor parallelism does not use torch's styles still hold."""

import pytest

from tests.bench.tensor_styles import refused
from tests.ranks import run_ranks


@pytest.mark.slow
def test_torchs_styles_still_cannot_split_these():
    uneven, outside = run_ranks(refused, 4)[0]
    assert "torch's: RuntimeError: a and b must have same reduction dim" in uneven
    assert "ours: IndexError: index out of range in self; torch's: outputs of norm" in outside
