"""Starting a run: one process in place, local ranks, or the ranks that already stand.

Whoever was started by the user keeps the record: it owns the run folder's status, the terminal and
wandb, and closes them however the run ends. With local ranks this process trains nothing; it
follows the rows that the first rank appends to ``metrics.jsonl``, so a rank that is killed takes
none of the record with it.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.forkserver
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from runner.config.check import parse
from runner.config.identity import config_hash
from runner.config.problem import Interrupted
from runner.config.schema import RunConfig
from runner.config.sizes import least_ranks
from runner.progress import steps_between_lines
from runner.start import print_line
from runner.sweep.objective import objective_of
from runner.sweep.page import write_page
from runner.telemetry.guidance import sentences
from runner.telemetry.jsonl import JsonlSink, follow
from runner.telemetry.provenance import provenance
from runner.telemetry.record import Record
from runner.telemetry.run_log import RunLog
from runner.telemetry.sink import Row, Sink
from runner.telemetry.terminal import TerminalSink, is_watched
from runner.telemetry.wandb_sink import WandbSink, new_run_id

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

log = logging.getLogger(__name__)

Work = Callable[[RunConfig, Sequence[Sink]], dict[str, Any]]
"""What a rank does with the configuration; rows go to the sinks, which the first rank has."""

ENDING = 5
"""Seconds that the other ranks have to end after one has failed, before they are killed."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        exit_code: 0 finished, 1 failed.
        objective: ``sweep.objective`` at its best; None if the run failed or did not record it.
    """

    exit_code: int
    objective: float | None = None


@dataclass(frozen=True)
class Failure:
    """Why a run did not finish."""

    state: Literal["failed", "interrupted"]
    exit_code: int
    error: str
    rank: int | None = None


class Terminated(BaseException):
    """SIGTERM was received."""


class RankFailed(Exception):
    """A local rank failed; carries the rank and its own traceback or signal."""

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error


def prepare(config: RunConfig) -> None:
    """Start the fork server, if the run will need one, while this process goes on.

    It imports torch in a process of its own; ranks then start in milliseconds.
    """
    if least_ranks(config.plugin) > 1:
        multiprocessing.set_forkserver_preload(["runner.ranks"])
        with _ignoring_interrupts():
            multiprocessing.forkserver.ensure_running()


def run(
    plain: dict[str, Any],
    folder: Path,
    words: Sequence[str] = (),
    *,
    tells: bool = True,
    swept: Sequence[str] = (),
) -> Ended:
    """Run one job to its end and record it in ``folder``. A failure is recorded, not raised.

    Args:
        plain: the resolved configuration, checked.
        folder: the run's own folder, which exists.
        words: what the user typed, for the run's name.
        tells: whether to say on the terminal that it failed, and where the results are.
        swept: keys that the sweep of this run varies: the run gives no advice on them.

    Raises:
        Interrupted: the user interrupted; it is recorded.
        SystemExit: with 143 after SIGTERM; it is recorded.
    """
    config = parse(plain)
    run_id = new_run_id() if config.tracker.name == "wandb" else None
    record = Record(folder)
    made_with = provenance()  # may take seconds, after which an interrupt would not be recorded
    record.begin(plain, config_hash(plain), run_id)
    shown: list[Sink] = [_Steps(record), RunLog(folder, words, made_with)]
    summary: dict[str, Any] | None = None
    failure: Failure | None = None

    def show_and_train() -> dict[str, Any]:
        title = folder.name if tells else f"run {folder.name}"
        shown.extend(_sinks(config, plain, folder, run_id, words, title))
        return train(config, plain, folder, shown)

    with _warnings_logged():
        ended = attempt(show_and_train)
    if isinstance(ended, Failure):
        failure = ended
    else:
        said = sentences(ended.get("remarks", ()), swept)
        summary = ended | {"guidance": said} | made_with
    exit_code = 0 if failure is None else failure.exit_code
    if summary is not None:
        record.summary(summary)
    # First of all: closing wandb may take seconds, in which the user may interrupt again.
    if failure is None:
        record.end("finished", 0, None, None, None)
    else:
        record.end(failure.state, failure.exit_code, failure.error, failure.rank, None)
    if failure is not None:
        log.info("%s", failure.error)
    for sink in shown:
        sink.close(summary, exit_code)
    page = write_page(folder)
    if failure is not None and failure.state == "failed":
        what = "the run" if config.plugin.name == "single" else f"rank {failure.rank}"
        _tell(failure, what, folder, logging.ERROR if tells else logging.INFO)
    if tells:
        print_line(str(page or folder))
    if failure is None:
        assert summary is not None
        return Ended(0, objective_of(summary, config.sweep.objective))
    if failure.exit_code == 130:
        raise Interrupted
    if failure.exit_code == 143:
        raise SystemExit(143)
    return Ended(1)


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Failure:
    """What ``work`` returns, or why it did not get there; SIGTERM ends it like any failure."""
    try:
        with _terminated_by_sigterm():
            return work()
    except BaseException as error:
        return _why(error)


def join(work: Work | None = None) -> int:
    """Be one of the ranks that torchrun or Slurm started, but the first: it sends what to run.

    Args:
        work: what each rank does; a run's training by default.

    Returns:
        The exit code.
    """
    import torch.distributed as dist

    from runner.booster.process_group import launch_from_torch, leave
    from runner.job import execute
    from runner.ranks import log_to

    try:
        launch_from_torch(verbose=False)
        sent: list[Any] = [None, None]
        dist.broadcast_object_list(sent, src=0)
        plain, folder = sent
        if folder.is_dir():  # not on another machine without a shared disk
            log_to(folder / "runner.log", dist.get_rank())
        (work or execute)(parse(plain), [])
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        leave()
    return 0


def train(
    config: RunConfig,
    plain: dict[str, Any],
    folder: Path,
    shown: Sequence[Sink],
    work: Work | None = None,
) -> dict[str, Any]:
    """Train in the way that ``config`` and the environment ask for.

    Args:
        config: the configuration.
        plain: the same as plain containers.
        folder: for rows and the log of ranks.
        shown: where rows go besides.
        work: what each rank does, a function of a module that ranks can import; a run's training by
            default.

    Returns:
        What the first rank's work returned: the summary of a run.
    """
    from runner import build
    from runner.booster.process_group import launch_from_torch, leave, stand_alone
    from runner.job import execute

    joined = build.joined_ranks()
    if is_watched(sys.stderr) and build.device_of(config.device).type == "cpu":
        plain = {**plain, "log": {**plain["log"], "flush": 1}}
        config = parse(plain)
    if joined is None and build.ranks_of(config) > 1:
        return _train_on_local_ranks(plain, folder, build.ranks_of(config), shown, work)
    try:
        if joined is not None and config.plugin.name != "single":
            import torch.distributed as dist

            launch_from_torch(verbose=False, timeout=config.launch.timeout)
            dist.broadcast_object_list([plain, folder.absolute()], src=0)
        elif config.plugin.name != "single":
            stand_alone()
        return (work or execute)(config, [JsonlSink(folder / "metrics.jsonl"), *shown])
    finally:
        leave()


def _train_on_local_ranks(
    plain: dict[str, Any], folder: Path, ranks: int, shown: Sequence[Sink], work: Work | None
) -> dict[str, Any]:
    """Start ranks by torch elastic, follow the first one's rows, and wait for all.

    Raises:
        RankFailed: the first rank that failed. No rank is left behind.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from runner.ranks import rank_main

    multiprocessing.set_forkserver_preload(["runner.ranks"])
    stopped = threading.Event()
    follower = threading.Thread(
        target=_feed, args=(folder / "metrics.jsonl", stopped, shown), name="rows"
    )
    follower.start()
    try:
        with tempfile.TemporaryDirectory(prefix="clip-runner-") as logs, _quiet_elastic():
            launch = elastic_launch(_launch_config(ranks, logs), rank_main)
            try:
                summaries: dict[int, dict[str, Any]] = launch(plain, str(folder), work)
            except ChildFailedError as error:
                rank, failed = error.get_first_failure()
                raise RankFailed(rank, _rank_error(failed, Path(logs))) from None
    finally:
        stopped.set()
        follower.join()
    return summaries[0]


def _launch_config(ranks: int, logs: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        # What ranks print on stderr is shown, and kept for those that die without a traceback.
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ERR),
        # On a terminal such a line takes the place of the bar.
        log_line_prefix_template=("\r\x1b[K" if is_watched(sys.stderr) else "") + "rank ${rank}: ",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        shutdown_timeout=ENDING,
    )


def _rank_error(failed: ProcessFailure, logs: Path) -> str:
    """Return a rank's traceback; where it left none, what it printed and how it ended."""
    message: Any = failed.message  # torch declares it as text
    if isinstance(message, dict):
        words = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
        return str(words).strip()
    printed: list[str] = []
    for file in logs.glob(f"*/attempt_*/{failed.local_rank}/stderr.log"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        printed = [line for line in lines if line.strip()][-20:]
    if failed.exitcode < 0:
        end = str(message).strip()  # the signal
    elif printed:
        end = f"it exited with code {failed.exitcode} and printed last: {printed[-1].strip()}"
    else:
        end = f"it exited with code {failed.exitcode} and printed nothing"
    return "\n".join([*printed, end])


def _feed(file: Path, stopped: threading.Event, sinks: Sequence[Sink]) -> None:
    for row in follow(file, stopped):
        for sink in sinks:
            sink.write(row)


def _sinks(
    config: RunConfig,
    plain: dict[str, Any],
    folder: Path,
    run_id: str | None,
    words: Sequence[str],
    title: str,
) -> list[Sink]:
    from runner import build

    data = build.make_data(config.data)
    steps = build.steps_of(config, data)
    evaluation = build.steps_of(config, data, duration=config.eval.interval)
    # On a pipe a line a step would bury everything else.
    interval = steps_between_lines(evaluation, max(config.log.interval, config.log.flush))
    sinks: list[Sink] = [TerminalSink(steps, interval, title)]
    if run_id is not None:
        tracker = config.tracker
        sinks.append(
            WandbSink(
                folder,
                mode=tracker.mode,
                project=tracker.project,
                group=tracker.group,
                tags=tracker.tags,
                job_type=tracker.job_type,
                name=" ".join(words) or folder.name,
                run_id=run_id,
                config=plain,
            )
        )
    return sinks


class _Steps:
    """Keeps the step in ``status.json``."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def write(self, row: Row) -> None:
        self._record.progress(int(row["train/step"]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass


def _why(error: BaseException) -> Failure:
    match error:
        case RankFailed():
            return Failure("failed", 1, error.error, error.rank)
        case KeyboardInterrupt():
            return Failure("interrupted", 130, "interrupted by the user")
        case Terminated():
            return Failure("interrupted", 143, "terminated by SIGTERM")
        case _ if (number := getattr(error, "sigval", None)) is not None:
            # torch elastic turns the signals it receives into an exception of its own.
            if number == signal.SIGINT:
                return Failure("interrupted", 130, "interrupted by the user")
            return Failure("interrupted", 143, f"terminated by {signal.Signals(number).name}")
    return Failure("failed", 1, "".join(traceback.format_exception(error)).strip(), 0)


def _tell(failure: Failure, what: str, folder: Path, level: int) -> None:
    last = failure.error.splitlines()[-1] if failure.error else "no message"
    log.log(level, "%s failed: %s (see %s)", what, last, folder / "status.json")


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Let processes that are started inside ignore Ctrl-C: this one ends them by SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """Send Python's warnings to the log, and so to ``runner.log``."""
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """Raise :class:`Terminated` inside on SIGTERM; all handlers are put back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in watched}
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence torch elastic's own report of a failure: ours is shorter, and in the record."""
    about = ("torch.distributed", "torch.multiprocessing")
    known = [name for name in logging.root.manager.loggerDict if name.startswith(about)]
    loggers = [logging.getLogger(name) for name in known]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
