"""Run one job of a sweep, and record how it ended."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from runner.compose.launchers import Where, where
from runner.compose.masking import recorded_words, resolved_and_recorded, write_composition
from runner.config import disk
from runner.config.check import parse
from runner.config.environment import slurm_job
from runner.config.identity import config_hash
from runner.config.problem import Problem, RequestError
from runner.config.secrets import hide
from runner.launch import signals
from runner.launch.supervise import write_page
from runner.run_folder import files
from runner.run_folder.claim import claimed
from runner.run_folder.sweep_record import Entry, SweepRecord, changed
from runner.sweep import live
from runner.sweep.engines import enter
from runner.sweep.follow import gives_up
from runner.sweep.resume import load_status
from runner.telemetry.sinks import recorder_process
from runner.telemetry.sinks.console import print_line

_LONGEST_TAG = 64  # wandb's own limit

PAGE_SECONDS = 0.1
"""Shortest time between two pages of a sweep, for each run on the page: several times the time to
write it."""


def run_job(config: DictConfig) -> float | None:
    """Run one job of a sweep; Hydra's launcher calls this, possibly in another process."""
    settings = HydraConfig.get()
    folder = Path(settings.sweep.dir)
    enter(settings.launcher._target_)
    try:
        if message := disk.shortage(folder):
            return _stop(message)
        return _run(config)
    except OSError as error:
        message = disk.told(error)
        if message is None:
            raise
        return _stop(message)
    except (SystemExit, KeyboardInterrupt):
        match _where(settings):
            case "here":
                raise
            case "elsewhere":
                signals.requeue()
                raise
        return None  # joblib would end the other runs
    finally:
        if _where(settings) != "here":
            recorder_process.end_kept()


def _run(config: DictConfig) -> float | None:
    """Run the job and record it; see :func:`run_job`."""
    from runner.launch import supervise
    from runner.launch.resume import decide

    settings = HydraConfig.get()
    sweep, folder = Path(settings.sweep.dir), Path(settings.runtime.output_dir)
    words = recorded_words(settings.overrides.task)
    resolved, plain = resolved_and_recorded(config)
    if folder.parent != sweep:
        message = "the runs of a sweep lie directly in its folder: name one folder, without slashes"
        raise RequestError([Problem("hydra.sweep.subdir", settings.sweep.subdir, message)])
    with changed(sweep) as record:
        elsewhere = _where(settings) == "elsewhere"
        # A job in Slurm goes on if only the command that waits for it was interrupted.
        if gives_up(record) or (record.state == "interrupted" and not elsewhere):
            return None
        entry = _entry(record, settings.job.num, plain, words)
        entry.folder, entry.state = str(folder.relative_to(sweep)), "running"
        if elsewhere:
            entry.job = slurm_job()
        else:
            entry.pid = os.getpid()
    print_line(live.beginning(record, entry), sys.stderr)
    resolved, plain = (grouped(one, record.name) for one in (resolved, plain))
    full = False
    try:
        typed = parse(resolved)
        with claimed(folder):
            write_composition(folder / files.HYDRA)
            start = decide(typed, plain, folder)
            ended = supervise.run(
                typed,
                plain,
                folder,
                words,
                start=start,
                reports_end=False,
                swept=record.keys,
                alone=_where(settings) != "beside",
            )
        entry.exit_code, entry.objective = ended.exit_code, ended.objective
        entry.state = "finished" if ended.exit_code == 0 else "failed"
        full = ended.disk_full
    except Exception as error:  # the other runs may succeed
        entry.state, entry.exit_code, entry.error = "failed", 1, _last_line(error)
    except BaseException as error:
        entry.state, entry.exit_code = "interrupted", getattr(error, "code", 130)
        raise
    finally:
        entry.pid = None
        load_status(entry, sweep, record.objective)
        record = _note(sweep, entry)
        ended_runs = sum(one.ended for one in record.entries)
        left = record.total - ended_runs  # after the last run the sweep itself writes the page
        if left and _page_age(sweep) > PAGE_SECONDS * ended_runs:
            write_page(sweep, left)
    if entry.state == "failed":
        print_line(live.failure(record, entry), sys.stderr)
        if full:
            return _stop("repeat the command once there is space")
        if gives_up(record):
            return _stop(f"sweep.max_failures={record.max_failures}")
        if elsewhere:
            raise SystemExit(1)  # Slurm says so too
        return None
    objective = entry.objective
    return objective if objective is not None and math.isfinite(objective) else None


def _where(settings: Any) -> Where:
    """Return whether this is the process of the command, or one that a launcher started."""
    return where(settings.launcher._target_)


def _stop(why: str) -> float | None:
    """End the sweep, unless its launcher runs jobs in other processes, which cannot be stopped."""
    if _where(HydraConfig.get()) == "here":
        print_line(f"the sweep stops: {why}", sys.stderr)
        raise SystemExit(1)
    return None


def _entry(record: SweepRecord, number: int, plain: dict[str, Any], words: Sequence[str]) -> Entry:
    """Return the entry of a run; one is added if the sweeper chooses jobs as it goes."""
    try:
        return record.of(number)
    except KeyError:
        apart = [word for word in words if word.partition("=")[0] in record.keys]
        entry = Entry(number, str(number), apart, list(words), config_hash(plain))
        record.entries.append(entry)
        return entry


def _note(sweep: Path, entry: Entry) -> SweepRecord:
    """Replace the run's entry in the record."""
    with changed(sweep) as record:
        record.entries = [entry if one.number == entry.number else one for one in record.entries]
        record.failures += entry.state == "failed"
    return record


def _page_age(sweep: Path) -> float:
    """Return the seconds since the page of a sweep was written; infinite if there is none."""
    try:
        return time.time() - (sweep / files.PAGE).stat().st_mtime
    except FileNotFoundError:
        return math.inf


def grouped(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration with the sweep as group and tag, unless the user gave any."""
    tracker = dict(plain["tracker"])
    tracker["group"] = tracker.get("group") or name
    tracker["tags"] = tracker.get("tags") or [name[:_LONGEST_TAG]]
    return {**plain, "tracker": tracker}


def _last_line(error: Exception) -> str:
    lines = hide(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
