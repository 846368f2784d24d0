"""One run from its beginning to its record.

Whoever was started by the user keeps the record: it owns the status of the run's folder, the
terminal and wandb, and closes them however the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.check import parse
from runner.config.identity import config_hash
from runner.config.problem import Interrupted
from runner.config.schema import RunConfig
from runner.launch.dispatch import train
from runner.launch.failure import Failure, attempt
from runner.launch.page import write_page
from runner.run_folder import files, keys
from runner.run_folder.objective import objective_of
from runner.run_folder.provenance import provenance
from runner.run_folder.rows import Row
from runner.run_folder.status import Record
from runner.telemetry.guidance import sentences
from runner.telemetry.run_log import RunLog
from runner.telemetry.sinks.console import print_line
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.sinks.terminal import TerminalSink
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from runner.train.progress import steps_between_lines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        exit_code: 0 finished, 1 failed.
        objective: ``sweep.objective`` at its best; None if the run failed or did not record it.
    """

    exit_code: int
    objective: float | None = None


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
        record.end("finished", 0, None, None)
    else:
        record.end(failure.state, failure.exit_code, failure.error, failure.rank)
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


def _sinks(
    config: RunConfig,
    plain: dict[str, Any],
    folder: Path,
    run_id: str | None,
    words: Sequence[str],
    title: str,
) -> list[Sink]:
    from runner.train import build

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
        self._record.progress(int(row[keys.TRAIN_STEP]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass


def _tell(failure: Failure, what: str, folder: Path, level: int) -> None:
    last = failure.error.splitlines()[-1] if failure.error else "no message"
    log.log(level, "%s failed: %s (see %s)", what, last, folder / files.STATUS)


@contextmanager
def _warnings_logged() -> Iterator[None]:
    """Send Python's warnings to the log, and so to ``runner.log``."""
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
