"""How ranks are divided among the axes of a plugin."""

import pytest

from runner.config.check import parse
from runner.config.sizes import SizeError, least_ranks, may_grow, sizes
from tests.config.composed import plain

AXES = {"dp_size": 2, "tp_size": 2, "pp_size": 2}
TP_PP = {"tp_size": 2, "pp_size": 2}


def plugin(name, given):
    return parse(plain(f"plugin={name}")).plugin.model_copy(update=given)


@pytest.mark.parametrize(
    ("name", "given", "ranks", "dealt"),
    [
        ("ddp", {}, 4, (4, 1, 1, 1)),
        ("tensor", {}, 4, (1, 4, 1, 1)),
        ("pipeline", {}, 3, (1, 1, 3, 1)),
        ("pipeline", {"dp_size": 2}, 4, (2, 1, 2, 1)),
        ("moe", {}, 4, (4, 1, 1, 4)),
        ("moe", {"ep_size": 2}, 4, (4, 1, 1, 2)),
        ("hybrid", TP_PP, 8, (2, 2, 2, 1)),
        ("hybrid", {"tp_size": 2, "ep_size": 4}, 8, (4, 2, 1, 4)),
    ],
)
def test_what_is_left_open_takes_the_ranks_that_are_left(name, given, ranks, dealt):
    assert sizes(plugin(name, given), ranks) == dealt


@pytest.mark.parametrize(
    ("name", "given", "least", "grows"),
    [
        ("single", {}, 1, False),
        ("ddp", {}, 1, True),
        ("moe", {"ep_size": 2, "dp_size": 4}, 4, False),
        ("hybrid", {"tp_size": 2, "ep_size": 2}, 4, True),
        ("hybrid", AXES, 8, False),
        # Machines have equal numbers of ranks.
        ("ddp", {"nnodes": 2, "nproc": 4}, 8, False),
        ("tensor", {"nnodes": 3, "tp_size": 2}, 6, True),
    ],
)
def test_the_ranks_that_are_asked_for(name, given, least, grows):
    asked = plugin(name, given)
    assert (least_ranks(asked), may_grow(asked)) == (least, grows)
    if asked.nproc is None:  # what the sizes ask for is never refused
        assert sizes(asked, least)


@pytest.mark.parametrize(
    ("name", "given", "ranks", "key", "message"),
    [
        ("single", {}, 2, "nproc", "plugin=single is one process, not 2 ranks; plugin=ddp"),
        ("hybrid", AXES, 6, "nproc", "cannot be dp_size 2 x tp_size 2 x pp_size 2 = 8"),
        ("hybrid", TP_PP, 6, "nproc", "a multiple of tp_size 2 x pp_size 2 = 4"),
        ("tensor", {"tp_size": 4}, 2, "nproc", "a multiple of tp_size 4"),
        ("moe", {"ep_size": 4}, 6, "ep_size", "of 6 data-parallel ranks evenly"),
        ("hybrid", {"tp_size": 2, "ep_size": 2}, 2, "ep_size", "of 1 data-parallel ranks"),
        # Of several machines; three numbers: of ranks started, on a machine, and of machines.
        ("tensor", {"nnodes": 2}, 4, "tp_size", "4 do not divide the 2"),
        (
            "pipeline",
            {"nnodes": 2, "pp_size": 3, "dp_size": 1},
            4,
            "nproc",
            "ranks cannot be",
        ),
        ("tensor", {}, (4, 2, 2), "tp_size", "4 do not divide the 2 ranks of a machine"),
        ("hybrid", {"tp_size": 3}, (6, 2, 3), "tp_size", "(plugin.nnodes=3)"),
        ("ddp", {"nnodes": 3}, (4, 2, 2), "nnodes", "2 machines started ranks"),
        ("ddp", {"nnodes": 2, "nproc": 3}, (4, 2, 2), "nproc", "this machine has 2 ranks"),
    ],
)
def test_sizes_that_do_not_fit_say_the_numbers_and_a_way_out(
    monkeypatch, name, given, ranks, key, message
):
    variables = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    for variable in ("RANK", *variables):
        monkeypatch.delenv(variable, raising=False)
    started = isinstance(ranks, tuple)
    if started:
        monkeypatch.setenv("RANK", "0")
        for variable, value in zip(variables, ranks, strict=True):
            monkeypatch.setenv(variable, str(value))
    with pytest.raises(SizeError) as error:
        sizes(plugin(name, given), ranks[0] if started else ranks, started=started)
    assert error.value.key == key
    assert message in str(error.value)
