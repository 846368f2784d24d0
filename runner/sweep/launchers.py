"""Start the runs of a sweep by Hydra: in this process, in others of this machine, or in Slurm."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import OmegaConf

from runner.launch import signals
from runner.request.composer import SUBDIR
from runner.request.composition import refer_to
from runner.request.overrides import spelled_out
from runner.request.record import unresolved, write_yaml
from runner.request.request import Request
from runner.request.sweep_settings import setting
from runner.run_folder import files
from runner.run_folder.status import Entry, SweepRecord, changed
from runner.sweep import slurm
from runner.sweep.job import run_job, stop_sweep
from runner.telemetry.sinks.console import is_watched

_LATER = 5.0  # seconds that runs have longer than `shutdown.timeout`, until the sweep ends


def launch(request: Request, waiting: Sequence[Entry]) -> None:
    """Run what waits, or what a search chooses, where the launcher runs it."""
    sweep = request.folder

    def start() -> None:
        if request.is_search:
            _search(request)
        else:
            _launch_runs(request, waiting)

    if request.place == "here":
        start()
    elif request.place == "beside":
        signals.set_timeout(request.jobs[0].config.shutdown.timeout + _LATER)
        _beside(sweep, start)
    else:
        _in_slurm(sweep, [entry.number for entry in waiting], start)
    record = SweepRecord.read(sweep)
    if record.gives_up:
        stop_sweep(f"sweep.max_failures={record.max_failures}")


def _launch_runs(request: Request, waiting: Sequence[Entry]) -> None:
    """Let Hydra's launcher run what waits."""
    with _hydra(request) as arguments:
        launcher = Plugins.instance().instantiate_launcher(**arguments)
        batch = [[*entry.words, f"{SUBDIR}{entry.number}"] for entry in waiting]
        for result in launcher.launch(batch, 0):
            _ = result.return_value  # raises what a job raised


def _search(request: Request) -> None:
    """Let the sweeper of a search choose and run its runs."""
    with _hydra(request) as arguments:
        config = request.composition.config
        params = setting(config, "hydra.sweeper.params")
        if params:
            texts = [spelled_out(f"{key}={value}") for key, value in params.items()]
            config.hydra.sweeper.params = dict(text.split("=", 1) for text in texts)
        if not is_watched(sys.stderr):
            os.environ.setdefault("NO_COLOR", "1")  # Optuna would write colours into a file
        single: Any = OmegaConf.to_container(config.hydra.overrides.task)  # references too
        sweeper = Plugins.instance().instantiate_sweeper(**arguments)
        sweeper.sweep([*single, *request.lists.values()])


@contextmanager
def _hydra(request: Request) -> Iterator[dict[str, Any]]:
    """Set up Hydra for a sweep, and yield the arguments of its launcher and its sweeper."""
    config = request.composition.config
    with request.composer.active():
        refer_to(config)
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        write_yaml(request.folder / files.MULTIRUN, unresolved(config))
        context = HydraContext(request.composer, Callback())  # type: ignore[arg-type]
        yield {"hydra_context": context, "task_function": run_job, "config": config}


def _beside(sweep: Path, start: Callable[[], None]) -> None:
    """Run processes of this machine; pass on to them a signal that asks this one to stop."""
    signalled: set[int] = set()

    def pass_on() -> None:
        number = signals.requested()
        if not number:
            return
        with changed(sweep) as record:
            record.state = "interrupted"  # no further run begins
        running = {entry.pid for entry in record.entries if entry.state == "running" and entry.pid}
        for pid in running - signalled:
            signalled.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    signals.defer()  # a signal is passed on to the runs
    try:
        with _repeated(pass_on):
            start()
    except Exception:
        if not signals.requested():  # else it follows from the end of the runs
            raise
    signals.raise_noted()


def _in_slurm(sweep: Path, numbers: Sequence[int], start: Callable[[], None]) -> None:
    """Submit jobs, report how they go, and record the job of each run."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # submitit reads it here and in jobs
    jobs = slurm.Jobs(sweep, numbers)
    submitit = logging.getLogger("submitit")
    submitit.addFilter(slurm.is_news)
    try:
        with _repeated(jobs.look):
            start()
    finally:
        submitit.removeFilter(slurm.is_news)
        with changed(sweep) as record:  # they go on if this command was interrupted
            for number, job in jobs.by_number().items():
                record.of(number).job = job


@contextmanager
def _repeated(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` in a thread while the block runs, and at its end."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.2):
            look()

    thread = threading.Thread(target=follow, daemon=True, name="runs")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
