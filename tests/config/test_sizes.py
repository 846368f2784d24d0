"""How ranks are dealt to the axes of a plugin."""

import pytest

from runner.compose.request import request
from runner.config.folders import options
from runner.config.sizes import SizeError, least_ranks, may_grow, sizes


@pytest.fixture(scope="module")
def plugins():
    found = request([f"plugin={','.join(options('plugin'))}"], multirun=True, writes=False)
    return {job.config.plugin.name: job.config.plugin for job in found.jobs}


@pytest.mark.parametrize(
    ("name", "given", "ranks", "dealt"),
    [
        ("single", {}, 1, (1, 1, 1, 1)),
        ("ddp", {}, 4, (4, 1, 1, 1)),
        ("fsdp", {"dp_replicate": 2}, 4, (4, 1, 1, 1)),
        ("zero", {}, 3, (3, 1, 1, 1)),
        ("tensor", {}, 4, (1, 4, 1, 1)),
        ("tensor", {"tp_size": 2}, 4, (2, 2, 1, 1)),
        ("tensor", {"dp_size": 4}, 4, (4, 1, 1, 1)),
        ("pipeline", {}, 3, (1, 1, 3, 1)),
        ("pipeline", {"dp_size": 2}, 4, (2, 1, 2, 1)),
        ("pipeline", {"pp_size": 4}, 8, (2, 1, 4, 1)),
        ("moe", {}, 4, (4, 1, 1, 4)),
        ("moe", {"ep_size": 2}, 4, (4, 1, 1, 2)),
        ("moe", {"dp_size": 4}, 4, (4, 1, 1, 4)),
        ("hybrid", {}, 2, (2, 1, 1, 1)),
        ("hybrid", {"tp_size": 2, "pp_size": 2}, 8, (2, 2, 2, 1)),
        ("hybrid", {"dp_size": 2, "tp_size": 2, "pp_size": 2}, 8, (2, 2, 2, 1)),
        ("hybrid", {"tp_size": 2, "ep_size": 4}, 8, (4, 2, 1, 4)),
    ],
)
def test_what_is_left_open_takes_the_ranks_that_are_left(plugins, name, given, ranks, dealt):
    found = sizes(plugins[name].model_copy(update=given), ranks)
    assert found == dealt
    assert found.dp * found.tp * found.pp == ranks


@pytest.mark.parametrize(
    ("name", "given", "ranks", "key", "said"),
    [
        ("single", {}, 2, "nproc", "plugin=single is one process, not 2 ranks; plugin=ddp"),
        (
            "hybrid",
            {"dp_size": 2, "tp_size": 2, "pp_size": 2},
            6,
            "nproc",
            "6 ranks are not dp_size 2 x tp_size 2 x pp_size 2 = 8: give plugin.nproc=8, or leave",
        ),
        ("tensor", {"dp_size": 1, "tp_size": 2}, 4, "nproc", "4 ranks are not tp_size 2: give"),
        (
            "hybrid",
            {"tp_size": 2, "pp_size": 2},
            6,
            "nproc",
            "6 ranks are no multiple of tp_size 2 x pp_size 2 = 4: give plugin.nproc=4 or 8",
        ),
        ("tensor", {"tp_size": 4}, 2, "nproc", "no multiple of tp_size 4: give plugin.nproc=4,"),
        ("pipeline", {"dp_size": 2}, 3, "nproc", "no multiple of dp_size 2: give plugin.nproc=2 "),
        (
            "moe",
            {"ep_size": 4},
            6,
            "ep_size",
            "4 ranks cannot share the experts of 6 data-parallel ranks evenly: give "
            "plugin.ep_size=1, 2, 3 or 6, or another plugin.dp_size",
        ),
        ("hybrid", {"tp_size": 2, "ep_size": 2}, 2, "ep_size", "of 1 data-parallel ranks"),
    ],
)
def test_sizes_that_do_not_go_say_the_numbers_and_a_way_out(plugins, name, given, ranks, key, said):
    with pytest.raises(SizeError) as error:
        sizes(plugins[name].model_copy(update=given), ranks)
    assert isinstance(error.value, ValueError)
    assert error.value.key == key
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "given", "least", "grows"),
    [
        ("single", {}, 1, False),
        ("ddp", {}, 1, True),
        ("ddp", {"nproc": 3}, 3, False),
        ("tensor", {}, 1, True),
        ("tensor", {"tp_size": 2}, 2, True),
        ("tensor", {"tp_size": 2, "dp_size": 3}, 6, False),
        ("pipeline", {"dp_size": 2}, 2, True),
        ("moe", {"ep_size": 4}, 4, True),
        ("moe", {"ep_size": 2, "dp_size": 4}, 4, False),
        ("moe", {"dp_size": 4}, 4, False),
        ("hybrid", {"tp_size": 2, "pp_size": 2}, 4, True),
        ("hybrid", {"tp_size": 2, "ep_size": 2}, 4, True),
        ("hybrid", {"dp_size": 2, "tp_size": 2, "pp_size": 2}, 8, False),
        ("hybrid", {"dp_size": 2, "tp_size": 2, "nproc": 8}, 8, False),
    ],
)
def test_the_ranks_that_are_asked_for(plugins, name, given, least, grows):
    plugin = plugins[name].model_copy(update=given)
    assert least_ranks(plugin) == least
    assert may_grow(plugin) is grows
    if plugin.nproc is None:  # what the sizes ask for is never refused
        assert sizes(plugin, least)
