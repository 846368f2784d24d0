"""An exception on a rank arrives: the terminal, status.json and runner.log name it."""

import pytest

from tests.launch.ends import only_run, read
from tests.process import main

PLUGINS = {
    "ddp": ["plugin=ddp", "plugin.nproc=2"],
    "fsdp": ["plugin=fsdp", "plugin.nproc=2"],
    "zero": ["plugin=zero", "plugin.nproc=2"],
    "zero3": ["plugin=zero", "plugin.nproc=2", "plugin.zero_stage=3"],
    "tensor": ["plugin=tensor", "plugin.nproc=2"],
    "pipeline": ["plugin=pipeline", "plugin.nproc=2"],
    "moe": ["plugin=moe", "plugin.nproc=2", "+model.mixture=true"],
    "zero_bubble": ["plugin=pipeline", "plugin.nproc=2", "plugin.schedule=zero_bubble"],
    "hybrid": ["plugin=hybrid", "plugin.tp_size=2", "plugin.dp_size=2"],
}
PARTS = [
    f"{part}._target_=tests.launch.raising.{name}"
    for part, name in [
        ("model", "gpt"),
        ("data", "data"),
        ("loss", "Criterion"),
        ("optimizer", "Optimizer"),
    ]
]
PARTS += ["callbacks=[{_target_: tests.launch.raising.Callback}]", "optimizer.lr=0.01"]
SHORT = ["device=cpu", "tracker=none", "data.batch_size=4", "train.max_duration=20ba"]
SHORT += ["eval.interval=1ba", "checkpoint.interval=1ba", "launch.timeout=300"]
MEMORY = "can't allocate memory"
ERROR = "tests.launch.raising.PlantedError: planted error"
CAUSE = "KeyError: 'planted cause'"
FAULTS = {
    "forward": (ERROR, CAUSE),
    "forward memory": (MEMORY, "out of memory: lower data.batch_size"),
    "function": (ERROR, CAUSE),
    "backward memory": (MEMORY, "out of memory: lower data.batch_size"),
    "hook": (ERROR, CAUSE),
    "in-place": ("modified by an inplace operation", "RuntimeError"),
    "step": (ERROR, CAUSE),
    "step memory": (MEMORY, "out of memory: lower data.batch_size"),
    "criterion": (ERROR, CAUSE),
    "data": (ERROR, CAUSE, "data set Tokens, sample"),
    "evaluation": (ERROR, CAUSE),
    "checkpoint": (ERROR, CAUSE),
    "callback": (ERROR, CAUSE),
}
DAILY = [
    ("hook", "ddp", "rank 1"),
    ("backward memory", "fsdp", "all ranks"),
    ("in-place", "zero", "rank 1"),
    ("evaluation", "pipeline", "all ranks"),
]
PRODUCT = [
    (fault, plugin, where)
    for fault in FAULTS
    for plugin in PLUGINS
    for where in ("rank 1", "all ranks")
    # The last stage of this schedule, which computes the loss, is on rank 0
    if (fault, plugin, where) != ("criterion", "zero_bubble", "rank 1")
]
CASES = [
    *DAILY,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in PRODUCT if case not in DAILY),
]


@pytest.mark.parametrize(("fault", "plugin", "where"), CASES)
def test_an_exception_on_a_rank_arrives(outputs, capsys, fault, plugin, where):
    ranks = [1] if where == "rank 1" else [0, 1, 2, 3]
    planted = [f"+model.fault={fault}", f"+model.ranks={ranks}"]
    assert main([*SHORT, *PARTS, *PLUGINS[plugin], *planted]) == 1
    folder = only_run(outputs)
    printed = capsys.readouterr().err
    status = read(folder)
    log = (folder / "runner.log").read_text()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["rank"] in ranks
    for text in FAULTS[fault]:
        for record in (printed, status["error"], log):
            assert text in record
    assert f"failed: rank {status['rank']}: " in printed
    assert "Traceback" not in printed
    assert "lost the connection" not in printed + status["error"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "kill backward"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_rank_that_was_killed_is_named(outputs, plugin, fault):
    planted = [f"+model.fault={fault}", "+model.ranks=[1]"]
    assert main([*SHORT, *PARTS, *PLUGINS[plugin], *planted]) == 1
    status = read(only_run(outputs))
    assert (status["state"], status["rank"]) == ("failed", 1)
    assert status["error"].startswith("rank 1 was ended by SIGKILL")


ODD = {
    "scheduler": (ERROR, CAUSE),
    "metric": (ERROR, CAUSE),
    "constructor": (ERROR, CAUSE),
    "import": (ERROR, CAUSE),
    "unpicklable": ("LocalError: planted error",),
    "keyboard": ("KeyboardInterrupt: planted error",),
    "system exit": ("SystemExit",),
    "os exit 0": ("called os._exit(0) before the training ended",),
    "os exit 3": ("exited with code 3",),
    "recursion": ("RecursionError: maximum recursion depth exceeded",),
    "warning": ("UserWarning: planted warning",),
    "group": ("ExceptionGroup: planted group",),
    "surrogate": ("PlantedError: planted ",),
    "bad text": ("BadTextError",),
    "stop iteration": ("StopIteration: planted error",),
    "generator exit": ("GeneratorExit: planted error",),
}
MORE_PARTS = [
    "scheduler._target_=tests.launch.raising.Scheduler",
    "eval.metrics=[{_target_: tests.launch.raising_metric.Metric}]",
]


IMPORTED = "callbacks=[{_target_: tests.launch.raising_import.Callback}]"
# An import and a constructor fail where the command checks the request, a process that calls
# os._exit ends with what it says, and a KeyboardInterrupt in this process is Ctrl-C.
NOT_SINGLE = ("constructor", "import", "keyboard", "os exit 0", "os exit 3")
DAILY_ODD = ("os exit 0", "ddp", "all ranks")
ODD_CASES = [
    (fault, plugin, where)
    for fault in ODD
    for plugin, where in [
        *(("single", "all ranks"), ("ddp", "rank 1"), ("ddp", "all ranks")),
        *(("fsdp", "rank 1"), ("pipeline", "rank 1"), ("pipeline", "all ranks")),
    ]
    if not (plugin == "single" and fault in NOT_SINGLE)
    if not (fault == "import" and where == "all ranks")
    # torch's pipeline reads the text, and raises another exception because there is none.
    if not (fault == "bad text" and plugin == "pipeline")
]


@pytest.mark.parametrize(
    ("fault", "plugin", "where"),
    [
        pytest.param(*case, marks=() if case == DAILY_ODD else pytest.mark.slow)
        for case in ODD_CASES
    ],
)
def test_an_odd_end_of_a_rank_is_named(outputs, capsys, fault, plugin, where):
    ranks = [1] if where == "rank 1" else [0, 1, 2, 3]
    if plugin == "single":
        ranks = [-1]
    parts = [IMPORTED if fault == "import" and "callbacks" in part else part for part in PARTS]
    words = [*SHORT, *parts, *MORE_PARTS, *PLUGINS.get(plugin, [])]
    words += [f"+model.fault={fault}", f"+model.ranks={ranks}"]
    assert main(words) == 1
    folder = only_run(outputs)
    printed = capsys.readouterr().err
    status = read(folder)
    log = (folder / "runner.log").read_text()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    for text in ODD[fault]:
        for record in (printed, status["error"], log):
            assert text in record
    if plugin != "single":
        assert status["rank"] in ranks
        assert f"failed: rank {status['rank']}" in printed
    assert "Traceback" not in printed
    assert "lost the connection" not in printed + status["error"]
