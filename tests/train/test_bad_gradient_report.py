"""The sentences about a bad gradient, from what each rank knows of it."""

import math

import pytest

from runner.train.bad_gradient_report import RankReport, describe

NAMES = [f"{number}.{kind}" for number in range(6) for kind in ("weight", "bias")]


def report(rank=0, bad=(), losses=(1.0, 1.0), traced=None, weights=(), names=NAMES, data_rank=None):
    positions = {name: (0, i, i) for i, name in enumerate(names)}
    read = rank if data_rank is None else data_rank
    return RankReport(
        rank, read, positions, list(bad), list(weights), (2.5, "0.weight"), list(losses), traced
    )


def samples(microbatch):
    return [[10 * microbatch + data_rank] for data_rank in range(4)]


def text(*reports):
    return describe(reports, math.nan, samples).with_samples()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (NAMES, "all 12 parameters;"),
        (NAMES[:2], "0.weight, 0.bias (before 1.weight, which is finite)"),
        (NAMES[-1:], "5.bias (after 5.weight, which is finite)"),
        (NAMES[1:9], "0.bias to 4.weight (8 parameters) (after 0.weight and before 4.bias, which"),
        (NAMES[::4], "0.weight (before 0.bias, which is finite); 2.weight (after 1.bias and"),
        (NAMES[::2], "; and 3 more groups of parameters"),
    ],
)
def test_bad_parameters_and_their_clean_neighbours(bad, said):
    assert said in text(report(bad=bad))


def test_the_fault_lies_before_the_last_bad_parameter_that_the_backward_pass_reaches():
    assert "goes wrong between 2.weight and 1.bias" in text(report(bad=NAMES[:4]))
    assert "goes wrong at 5.bias, or after it" in text(report(bad=NAMES))
    assert "Weights are not finite themselves: 1.bias" in text(
        report(bad=NAMES, weights=["1.bias"])
    )


def test_the_first_microbatch_with_a_bad_loss_on_any_rank_is_at_fault():
    found = text(
        report(0, NAMES, losses=(1.0, 1.0, math.nan)),
        report(1, NAMES, losses=(1.0, math.inf, math.nan)),
    )
    assert ", from rank 1, microbatch 2 of 3. The loss of this microbatch is inf" in found
    assert found.endswith("Its samples: 21")


def test_traced_gradients_tell_the_rank_where_no_loss_is_bad():
    found = text(
        report(0, NAMES[:2], traced=[]),
        report(1, NAMES[:2], traced=[(2, "0.bias"), (2, "0.weight")]),
        report(2, NAMES[:2], traced=[(2, "0.weight")]),
    )
    assert ", from ranks 1, 2, microbatch 2 of 2. All losses are finite" in found
    assert found.endswith("Its samples: 21, 22")


def test_ranks_that_read_the_same_samples_list_them_once():
    reports = [report(rank, NAMES, losses=[math.nan], data_rank=0) for rank in (0, 1)]
    assert text(*reports).endswith("Its samples: 10")


def test_what_is_not_known_is_not_claimed():
    everywhere = text(report(0, NAMES), report(1, NAMES))
    assert "on every rank; which rank and microbatch it came from is not known" in everywhere
    shard = text(report(0), report(1, NAMES[:1]))
    assert "held by rank 1; which rank and microbatch it came from is not known" in shard
    single = text(report(0, NAMES, losses=[1.0]), report(1, NAMES, losses=[1.0]))
    assert "which rank it came from is not known" in single
    assert "which microbatch it came from is not known" in text(report(0, NAMES))
    combined = text(report(0, traced=[]), report(1, NAMES[:1], traced=[]))
    assert "held by rank 1; before they were combined, all gradients were finite" in combined
    for unknown in (everywhere, shard, single, combined):
        assert "samples" not in unknown


def test_stages_on_different_ranks_are_in_the_order_of_the_pipeline():
    ends, middle = report(0), report(1, ["1.weight", "2.weight"])
    ends = ends._replace(positions={"0.weight": (0, 0, 0), "3.weight": (3, 4, 1)})
    middle = middle._replace(positions={"1.weight": (1, 0, 0), "2.weight": (2, 1, 1)})
    wanted = "1.weight, 2.weight (after 0.weight and before 3.weight, which are finite)"
    assert wanted in text(ends, middle)
