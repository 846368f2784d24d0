"""Every fault that other projects have had makes the comparison with one process fail here."""

import pytest

from tests.distributed.faults import PLANTED, caught_by, seen_without_fault, train_jobs
from tests.ranks import run_ranks


@pytest.mark.parametrize("plugin", sorted({plugin for _, plugin in PLANTED}))
@pytest.mark.product(every=3)
def test_nothing_is_seen_where_nothing_was_planted(plugin):
    assert seen_without_fault(plugin) == []


@pytest.mark.parametrize(("name", "plugin"), PLANTED)
@pytest.mark.product(every=6)
def test_a_planted_fault_is_caught(name, plugin):
    assert caught_by(name, plugin), f"{name} goes unseen under {plugin}"


@pytest.mark.parametrize(
    ("name", "plugin"),
    [("inputs of split layers not added", "tensor"), ("partial sums not added", "sequence")],
)
def test_the_first_step_names_gradients_that_tensor_ranks_have_a_part_of(name, plugin):
    with pytest.raises(AssertionError, match=r"PlanError: .*mlp_norm\.weight.* gradient differs"):
        run_ranks(train_jobs, 2, plugin, [(name, "gpt", "none")], True)


@pytest.mark.parametrize(
    ("name", "plugin", "parameter"),
    [
        ("replicas counted twice", "tensor", r"\S+\.weight"),
        ("tied copy counted twice", "1f1b", r"embed\.weight"),
    ],
)
def test_the_layouts_own_account_names_the_parameter(name, plugin, parameter):
    model = "tied" if plugin == "1f1b" else "gpt"
    with pytest.raises(AssertionError, match=f"LayoutError: {parameter} has .* account for"):
        run_ranks(train_jobs, 2, plugin, [(name, model, "L2")], True)
