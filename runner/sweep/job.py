"""Run one job of a sweep, and record how it ended."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config.check import parse
from runner.config.environment import slurm_job
from runner.config.folders import outputs
from runner.config.identity import config_hash
from runner.config.masking import masked_words
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import Failure
from runner.report.page import written
from runner.request.jobs import resolved_and_recorded
from runner.request.record import write_composition
from runner.request.sweep_settings import LAUNCHERS, Place
from runner.run_folder import files
from runner.run_folder.status import Entry, SweepRecord, changed, claimed
from runner.run_folder.strict_json import disk_full
from runner.sweep import live
from runner.sweep.resume import load_status
from runner.telemetry.sinks.console import print_line
from runner.workarounds import start_processes_as_python_does

PAGE_SECONDS = 0.1  # shortest time between two pages of a sweep, for each of its runs


def run_job(config: DictConfig) -> float | None:
    """Run one job of a sweep; Hydra's launcher calls this, possibly in another process."""
    place = LAUNCHERS[HydraConfig.get().launcher._target_.rpartition(".")[2]]
    if place != "here":
        _prepare_process(place == "beside")
    try:
        return _run(config, place)
    except OSError as error:
        message = disk_full(error)
        if message is None:
            raise
        stop_sweep(message, place)
    except (SystemExit, KeyboardInterrupt):
        if place == "elsewhere":
            signals.requeue()
        if place != "beside":  # joblib would end the other runs
            raise
    return None


@cache
def _prepare_process(beside: bool) -> None:
    """Prepare a process of a launcher for runs: its signals, and its end with the command."""
    start_processes_as_python_does()
    signals.listen()
    if not beside:
        return
    command = os.getppid()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # the terminal reaches the command alone, which passes signals on

    def watch() -> None:
        while os.getppid() == command:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # the command was killed

    threading.Thread(target=watch, daemon=True, name="command").start()


def _run(config: DictConfig, place: Place) -> float | None:
    """Run one job, and return its objective; None if it failed, or has none."""
    settings = HydraConfig.get()
    sweep = Path(settings.sweep.dir)
    folder = Path(settings.runtime.output_dir)
    number = int(folder.name)
    _set_number(HydraConfig.instance().cfg, number)  # the launcher numbers what it launches
    typed: Any = OmegaConf.to_container(settings.overrides.task)  # references as typed
    overrides = masked_words(typed)
    resolved, plain = resolved_and_recorded(config)
    waiting = Entry(number, str(number), [], overrides, config_hash(plain))
    record, entry = _begin(sweep, waiting, place)
    if entry is None:
        return None
    print_line(live.news(record, entry), sys.stderr)
    resolved = grouped(resolved, record.name)
    plain = grouped(plain, record.name)
    disk_is_full = False
    has_begun = True
    try:
        if entry is not waiting:
            _require_planned(config, entry)
        failure = _train(config, folder, parse(resolved), plain, overrides, record.keys, place)
        entry.state = "failed" if failure else "finished"
        disk_is_full = bool(failure and failure.disk_full)
    except Exception as error:  # the other runs may succeed
        has_begun = False
        entry.state = "failed"
        entry.exit_code = 1
        entry.error = f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()
    except BaseException as error:
        entry.state = "interrupted"
        entry.exit_code = getattr(error, "code", 130)
        raise
    finally:
        record = _end(sweep, entry, record.objective if has_begun else None)
    if entry.state != "failed":
        objective = entry.objective
        return objective if objective is not None and math.isfinite(objective) else None
    print_line(live.news(record, entry), sys.stderr)
    if disk_is_full:
        stop_sweep("repeat the command once there is space", place)
    elif record.gives_up:
        stop_sweep(f"sweep.max_failures={record.max_failures}", place)
    return None


def _begin(sweep: Path, waiting: Entry, place: Place) -> tuple[SweepRecord, Entry | None]:
    """Record that a run begins: return the record and its entry, None if the sweep has stopped.

    The entry is the one that was planned. ``waiting`` becomes the entry of a run of a search.
    """
    with changed(sweep) as record:
        # A job in Slurm goes on if only the command that waits for it was interrupted.
        if record.gives_up or (record.state == "interrupted" and place != "elsewhere"):
            return record, None
        if waiting.number not in {entry.number for entry in record.entries}:
            keys = record.keys
            waiting.overrides = [text for text in waiting.words if text.partition("=")[0] in keys]
            record.entries.append(waiting)
        entry = record.of(waiting.number)
        entry.state = "running"
        entry.pid = os.getpid()
        entry.job = slurm_job() if place == "elsewhere" else None
    return record, entry


def _require_planned(config: DictConfig, entry: Entry) -> None:
    """Refuse a run whose configuration is not the one that was planned."""
    if hash_of_plan(config) != entry.config_hash:
        raise RuntimeError(
            "this is not the run that was planned: a file that its configuration refers to "
            "was changed while the sweep runs; repeat the command"
        )


def _train(
    config: DictConfig,
    folder: Path,
    typed: RunConfig,
    plain: dict[str, Any],
    overrides: list[str],
    varied: list[str],
    place: Place,
) -> Failure | None:
    """Train a run in its folder, and return why it failed; None if it has not."""
    from runner.launch import supervise
    from runner.launch.resume import decide

    with claimed(folder):
        write_composition(folder / files.HYDRA, config)
        run = supervise.Run(
            typed,
            plain,
            folder,
            overrides,
            start=decide(typed, plain, folder),
            swept=varied,
            alone=place != "beside",
        )
        return supervise.run(run)


def _end(sweep: Path, entry: Entry, objective: str | None) -> SweepRecord:
    """Record how a run ended, with the results in its folder, and update the page of the sweep.

    ``objective`` is None if the run has not begun: its folder may hold an earlier attempt.
    """
    entry.pid = None
    if objective is not None:
        load_status(entry, sweep, objective)
    with changed(sweep) as record:
        by_number = {item.number: item for item in [*record.entries, entry]}
        record.entries = [by_number[number] for number in sorted(by_number)]
        record.failures += entry.state == "failed"
    _update_page(record, sweep)
    return record


def hash_of_plan(config: DictConfig) -> str:
    """Return the hash of a job's configuration, as it was before the run had a folder."""
    runtime = HydraConfig.instance().cfg.hydra.runtime  # type: ignore[union-attr]
    folder = runtime.output_dir
    with read_write(runtime):
        runtime.output_dir = str(outputs())
        try:
            _, plain = resolved_and_recorded(config)
        finally:
            runtime.output_dir = folder
    return config_hash(plain)


def _set_number(config: Any, number: int) -> None:
    """Set what ``${hydra:job.num}`` and ``${hydra:job.id}`` are, as they were checked."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num = number
        config.hydra.job.id = str(number)
        config.hydra.sweep.subdir = "${hydra.job.num}"


def stop_sweep(why: str, place: Place = "here") -> None:
    """End the command, unless runs are in other processes, which cannot be stopped."""
    if place != "here":
        return
    print_line(f"the sweep stops: {why}", sys.stderr)
    raise SystemExit(1)


def _update_page(record: SweepRecord, sweep: Path) -> None:
    """Write the page of a sweep, unless it is new or the sweep itself is about to write it."""
    ended = sum(entry.ended for entry in record.entries)
    waiting = record.total - ended
    page = sweep / files.PAGE
    age = time.time() - page.stat().st_mtime if page.exists() else math.inf
    if waiting and age > PAGE_SECONDS * ended:
        written(sweep, waiting)


def grouped(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration with the sweep as group and tag, unless the user gave any."""
    tracker = dict(plain["tracker"])
    tracker["group"] = tracker.get("group") or name
    tracker["tags"] = tracker.get("tags") or [name[:64]]  # wandb's own limit
    return {**plain, "tracker": tracker}
