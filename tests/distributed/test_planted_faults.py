"""Every fault that other projects have had makes the comparison with one process fail here."""

import pytest

from tests.distributed.faults import PLUGINS, seen_under

NAMED = {
    ("inputs of split layers not added", "tensor"): ("PlanError", "mlp_norm.weight"),
    ("partial sums not added", "sequence"): ("PlanError", "mlp_norm.weight"),
    ("replicas counted twice", "tensor"): ("LayoutError", ".weight"),
    ("replicas counted twice", "1f1b"): ("LayoutError", "embed.weight"),
}
"""Faults that a check raises an error about, with its type and a parameter that it names."""


@pytest.mark.parametrize("plugin", PLUGINS)
def test_each_planted_fault_is_seen_and_nothing_else(plugin):
    for name, found, error in seen_under(plugin):
        assert bool(found) == (name is not None), (name, found)
        assert name is not None or error is None
        if (name, plugin) in NAMED:
            assert all(each in error for each in NAMED[name, plugin]), (name, error)
