"""Send rows to wandb from a thread, so that training never waits for a server."""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.run_folder import files, keys
from runner.run_folder.strict_json import Row, read_rows, spelled
from runner.telemetry.sinks.wandb_file import last_recorded_step
from runner.workarounds import (
    import_pandas_before_wandb,
    kill_client_of_wandb,
    stop_client_of_wandb,
)

if TYPE_CHECKING:
    from wandb import Run

SERVER_SECONDS = 5.0  # that a server may take to accept a run, and at the end the rest of it

log = logging.getLogger("runner.wandb")


def new_run_id() -> str:
    """Return a new id of a run at wandb: eight hexadecimal digits."""
    return secrets.token_hex(4)  # like wandb's own; no seeded generator repeats it


def records(mode: str) -> bool:
    """Return whether wandb records anything in a mode."""
    return mode != "disabled" and (mode, os.environ.get("WANDB_MODE")) != ("auto", "disabled")


def effective_mode(mode: str) -> str:
    """Return the mode in which a run is recorded: ``auto`` is what wandb itself would choose."""
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "")
    if not mode:
        wandb = _imported()
        mode = wandb.setup().settings.mode
        if mode == "online":
            # Credentials of a wrong form count: the attempt to go online logs one warning.
            with suppress(wandb.errors.AuthenticationError):
                mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    return {"run": "online", "shared": "online", "dryrun": "offline"}.get(mode, mode)


class WandbSink:
    """Records a run with wandb, in ``folder/wandb``; see the section ``tracker`` for its arguments.

    A run that continues after a step has ``continued_after``. Rows that wandb has already are not
    recorded again. Rows up to that step that were lost with a process are read from the run's own
    rows; later ones are trained again.
    ``labels`` are further arguments of ``wandb.init``: ``project``, ``group``, ``tags``, ``name``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: str,
        timeout: float,
        run_id: str,
        config: dict[str, Any],
        continued_after: int | None = None,
        time_left: Callable[[], float] = lambda: math.inf,
        **labels: Any,
    ) -> None:
        self._folder = folder.absolute()
        self._mode = mode
        self._timeout = timeout
        self._run_id = run_id
        self._time_left = time_left
        self._continued_after = continued_after
        self._recorded = -1
        self._init = {"dir": str(self._folder), "id": run_id, "config": config, **labels}
        self._init["resume"] = None if continued_after is None else "allow"
        self._queue: queue.SimpleQueue[Callable[[Run], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._warned = False
        if records(mode):
            # Not in the thread: a loader's worker forked meanwhile would find locked modules.
            _imported()
            self._thread = threading.Thread(target=self._record, daemon=True, name="wandb")
            self._thread.start()

    def write(self, row: Row) -> None:
        if self._thread is not None:
            copy = dict(row)
            self._queue.put(lambda run: self._log(run, copy))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Send the end of the run and wait until it is recorded, ``timeout`` seconds at most."""
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        # wandb keeps the last value of each metric under its own key.
        whole = dict(summary or {})
        flat = {**dict(_flat(whole.pop("final", {}))), **dict(_flat(whole))}
        self._queue.put(lambda run: run.summary.update(flat))
        self._queue.put(lambda run: run.finish(exit_code=exit_code))
        self._queue.put(None)
        thread.join(max(0.0, min(self._timeout, self._time_left())))
        if thread.is_alive():
            limit = "tracker.timeout" if self._time_left() > 0 else "shutdown.timeout"
            self._warn("wandb did not end in time", limit)
            kill_client_of_wandb()
            thread.join(1.0)

    def _record(self) -> None:
        try:
            run = self._open()
            self._log_lost_rows(run)
            while (task := self._queue.get()) is not None:
                task(run)
        except Exception as error:
            self._warn("wandb did not record or send the whole run", error)
            with suppress(Exception):
                stop_client_of_wandb(_imported())

    def _log(self, run: Run, row: Row) -> None:
        step = int(row[keys.TRAIN_STEP])
        if step > self._recorded:
            # wandb's own step is ours too, so that a server says how far it has the run. Without
            # ``commit`` a row with a step would stay open for later keys.
            run.log(row, step=step, commit=True)

    def _log_lost_rows(self, run: Run) -> None:
        """Find out how far a continued run is recorded, and log the rows after that."""
        checkpoint = self._continued_after
        if checkpoint is None:
            return
        self._recorded = self._last_recorded(run, checkpoint)
        for row in read_rows(self._folder / files.ROWS):
            if row[keys.TRAIN_STEP] > checkpoint:  # the training has gone on meanwhile
                break
            self._log(run, row)

    def _last_recorded(self, run: Run, checkpoint: int) -> int:
        if run.resumed:  # online: what the server has
            return run.starting_step - 1
        try:
            step = last_recorded_step(self._folder, self._run_id)
        except Exception as error:  # wandb may change the format of its files
            log.info("wandb's files of this run cannot be read (%r)", error)
            step = None
        return checkpoint if step is None else step

    def _open(self) -> Run:
        """Begin the run, offline if no server accepts it."""
        mode = effective_mode(self._mode)
        begun = set(self._folder.glob(f"{files.WANDB}/run-*"))
        try:
            run = self._begin(mode)
        except Exception as error:
            if mode != "online":
                raise
            stop_client_of_wandb(_imported())
            for failed in set(self._folder.glob(f"{files.WANDB}/run-*")) - begun:
                shutil.rmtree(failed, ignore_errors=True)
            self._warn("wandb cannot record online; this run is recorded offline", error)
            mode = "offline"
            run = self._begin(mode)
        log.info("wandb: %s (tracker.mode=%s) %s", mode, self._mode, run.url or "")
        return run

    def _begin(self, mode: str) -> Run:
        wandb = _imported()
        wishes = {
            "silent": True,
            "console": "off",
            "reinit": "create_new",
            "init_timeout": min(SERVER_SECONDS, self._timeout),
            "finish_timeout": min(SERVER_SECONDS, self._timeout),
            "finish_timeout_raises": True,
            # No arguments, code, environment or packages of the program: they may hold secrets.
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": not any(Path("/dev").glob("nvidia[0-9]*")),
            # A client that is killed loses a second of the record instead of fifteen.
            "x_transaction_log_flush_interval": 1.0,
        }
        fields = wandb.Settings.model_fields  # fields with x_ come and go
        settings = {key: value for key, value in wishes.items() if key in fields}
        run: Run = wandb.init(**self._init, mode=mode, settings=settings)
        run.define_metric(keys.TRAIN_STEP)
        run.define_metric("*", step_metric=keys.TRAIN_STEP)
        return run

    def _warn(self, what: str, why: object) -> None:
        if not self._warned:
            self._warned = True
            reason = str(why).strip().partition("\n")[0] or type(why).__name__
            place = self._folder / files.WANDB
            log.warning("%s (%s). To send it later: wandb sync %s/*run-*", what, reason, place)


def _imported() -> Any:
    """Return the module wandb, which prints nothing and so prompts for nothing."""
    # Error reports would be sent to wandb even if the run is recorded offline.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    import_pandas_before_wandb()
    silent = wandb.Settings(silent=True)
    wandb.termsetup(silent, None)
    wandb.setup(settings=silent)
    return wandb


def _flat(summary: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in summary.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", spelled(value)
