"""Run one job of a sweep, and record how it ended."""

from __future__ import annotations

import math
import multiprocessing
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

from runner.config.environment import slurm_job
from runner.config.folders import outputs
from runner.config.identity import config_hash
from runner.config.masking import masked_words
from runner.config.schema import parse
from runner.launch import signals
from runner.report.page import written
from runner.request.jobs import LAUNCHERS, resolved_and_recorded, write_composition
from runner.run_folder import files
from runner.run_folder.status import Entry, SweepRecord, changed, claimed
from runner.run_folder.strict_json import disk_full
from runner.sweep import live
from runner.sweep.resume import load_status
from runner.telemetry.sinks.console import print_line

PAGE_SECONDS = 0.1  # shortest time between two pages of a sweep, for each of its runs


def run_job(config: DictConfig) -> float | None:
    """Run one job of a sweep; Hydra's launcher calls this, possibly in another process."""
    place = LAUNCHERS[HydraConfig.get().launcher._target_.rpartition(".")[2]]
    if place != "here":
        _prepare_process(place == "beside")
    try:
        return _run(config, place)
    except OSError as error:
        if (message := disk_full(error)) is None:
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
    # joblib's processes have a method of their own to start others, which ranks do not know.
    multiprocessing.set_start_method(None, force=True)
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


def _run(config: DictConfig, place: str) -> float | None:
    from runner.launch import supervise
    from runner.launch.resume import decide

    settings = HydraConfig.get()
    sweep, folder = Path(settings.sweep.dir), Path(settings.runtime.output_dir)
    number = int(folder.name)
    _set_number(HydraConfig.instance().cfg, number)  # the launcher numbers what it launches
    typed: Any = OmegaConf.to_container(settings.overrides.task)  # references as typed
    words = masked_words(typed)
    resolved, plain = resolved_and_recorded(config)
    with changed(sweep) as record:
        # A job in Slurm goes on if only the command that waits for it was interrupted.
        if record.gives_up or (record.state == "interrupted" and place != "elsewhere"):
            return None
        searched = number not in {one.number for one in record.entries}
        if searched:
            apart = [word for word in words if word.partition("=")[0] in record.keys]
            record.entries.append(Entry(number, str(number), apart, words, config_hash(plain)))
        entry = record.of(number)
        entry.state, entry.pid = "running", os.getpid()
        entry.job = slurm_job() if place == "elsewhere" else None
    planned = entry.config_hash
    print_line(live.news(record, entry), sys.stderr)
    resolved, plain = (grouped(one, record.name) for one in (resolved, plain))
    full, refused = False, False
    try:
        if not searched and hash_of_plan(config) != planned:
            raise RuntimeError(
                "this is not the run that was planned: a file that its configuration refers to "
                "was changed while the sweep runs; repeat the command"
            )
        typed = parse(resolved)
        with claimed(folder):
            write_composition(folder / files.HYDRA, config)
            failed = supervise.run(
                typed,
                plain,
                folder,
                words,
                start=decide(typed, plain, folder),
                swept=record.keys,
                alone=place != "beside",
            )
        entry.state = "failed" if failed else "finished"
        full = bool(failed and failed.disk_full)
    except Exception as error:  # the other runs may succeed
        refused = True
        entry.state, entry.exit_code = "failed", 1
        entry.error = f"{type(error).__name__}: {error}".strip().splitlines()[-1].strip()
    except BaseException as error:
        entry.state, entry.exit_code = "interrupted", getattr(error, "code", 130)
        raise
    finally:
        entry.pid = None
        if not refused:  # its folder may hold the status of an earlier attempt
            load_status(entry, sweep, record.objective)
        with changed(sweep) as record:
            others = [one for one in record.entries if one.number != entry.number]
            record.entries = sorted([*others, entry], key=lambda one: one.number)
            record.failures += entry.state == "failed"
        _update_page(record, sweep)
    if entry.state != "failed":
        objective = entry.objective
        return objective if objective is not None and math.isfinite(objective) else None
    print_line(live.news(record, entry), sys.stderr)
    if full:
        stop_sweep("repeat the command once there is space", place)
    elif record.gives_up:
        stop_sweep(f"sweep.max_failures={record.max_failures}", place)
    return None


def hash_of_plan(config: DictConfig) -> str:
    """Return the hash of a job's configuration, in which no folder is that of a run yet."""
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


def stop_sweep(why: str, place: str = "here") -> None:
    if place != "here":
        return  # other processes cannot be stopped
    print_line(f"the sweep stops: {why}", sys.stderr)
    raise SystemExit(1)


def _update_page(record: SweepRecord, sweep: Path) -> None:
    ended = sum(one.ended for one in record.entries)
    left, page = record.total - ended, sweep / files.PAGE
    age = time.time() - page.stat().st_mtime if page.exists() else math.inf
    if left and age > PAGE_SECONDS * ended:  # after the last run the sweep itself writes it
        written(sweep, left)


def grouped(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration with the sweep as group and tag, unless the user gave any."""
    tracker = dict(plain["tracker"])
    tracker["group"] = tracker.get("group") or name
    tracker["tags"] = tracker.get("tags") or [name[:64]]  # wandb's own limit
    return {**plain, "tracker": tracker}
