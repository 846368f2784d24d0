"""Send rows to wandb by a separate process, so that training never waits for a server."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import secrets
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from runner.run_folder import files, keys
from runner.run_folder.rows import Row
from runner.run_folder.strict_json import spelled
from runner.telemetry.sinks import recorder_process, wandb_record
from runner.telemetry.sinks.progress import wait_while_working
from runner.telemetry.sinks.recorder_process import RecorderProcess
from runner.telemetry.sinks.wandb_process import effective_mode

__all__ = ["WandbSink", "effective_mode", "new_run_id"]

SWEEP_JOB_TYPE = "sweep"
"""Job type of the run of a sweep, which holds the figures of its page."""

INIT_SECONDS = 5.0
"""Seconds that a server may take to accept a run before it is recorded offline."""

FINISH_SECONDS = 5.0
"""Seconds that a server may take at the end to accept the rest of the record."""

STALLED_SECONDS = 10.0
"""Seconds without progress after which :meth:`WandbSink.close` takes the process for stuck."""

MOST_VALUES = 2_000_000
"""Metrics that may wait for the process, about 200 MB; rows beyond that are left out."""

log = logging.getLogger("runner.wandb")


def new_run_id() -> str:
    """Return a new id in the form of wandb's own; no seeded generator repeats it."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def records(mode: str) -> bool:
    """Return whether a run with ``tracker.mode=mode`` is recorded, online or offline."""
    return mode != "disabled" and (mode, os.environ.get("WANDB_MODE")) != ("auto", "disabled")


class WandbSink:
    """Record a run with wandb, in ``folder/wandb``."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: str,
        timeout: float,
        project: str,
        group: str | None,
        tags: list[str],
        job_type: str,
        name: str,
        run_id: str,
        config: dict[str, Any],
        sent_until: int = -1,
        resumes: bool = False,
        time_left: Callable[[], float] = lambda: math.inf,
        more_follow: bool = False,
    ) -> None:
        self._timeout = timeout
        self._more_follow = more_follow
        self._time_left = time_left
        self._sent_until = sent_until
        self._queued = self._passed = 0  # metrics given to the queue, and taken from it
        self._heard = 0
        self._warned = False
        self._takes_more = False  # whether the process can record another run
        self._record = ""  # file of a run that was recorded offline to its end
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process: RecorderProcess | None = None
        if not records(mode):
            return
        request = {
            "record": str(folder.absolute() / files.WANDB),
            "step": keys.TRAIN_STEP,
            "mode": mode,
            "timeout": timeout,
            "init_seconds": min(INIT_SECONDS, timeout),
            "finish_seconds": min(FINISH_SECONDS, timeout),
            "run": {  # arguments of wandb.init
                "dir": str(folder.absolute()),
                "project": project,
                "group": group,
                "tags": list(tags),
                "job_type": job_type,
                "name": name,
                "id": run_id,
                "config": config,
                "resume": "allow" if resumes else None,
            },
        }
        try:
            self._process = recorder_process.take()
        except OSError as error:
            self._warn(f"wandb records nothing of this run: {error}")
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._outbox.put(request)
        self._sender = self._thread(self._send, self._process.stdin)
        self._listener = self._thread(self._listen, self._process.stdout)

    def write(self, row: Row) -> None:
        """Queue one row, which takes a microsecond."""
        if self._process is None or row[keys.TRAIN_STEP] <= self._sent_until:
            return
        if self._queued - self._passed > MOST_VALUES:
            self._warn(f"wandb is too slow for this run: its record lacks rows of {files.ROWS}")
            return
        self._queued += len(row)
        self._outbox.put({"row": dict(row)})

    def draw(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """Queue figures of plotly by their keys, in the form of JSON."""
        if self._process is not None:
            self._outbox.put({"figures": figures})

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Send the end of the run and wait until it is recorded, see the class."""
        process, self._process = self._process, None
        if process is None:
            return
        # wandb keeps the last value of each metric under its own key.
        whole = dict(summary or {})
        flat = {**dict(_flat(whole.pop("final", {}))), **dict(_flat(whole))}
        self._outbox.put({"summary": flat, "exit_code": exit_code})
        self._outbox.put(None)

        def has_ended(seconds: float) -> bool:
            self._listener.join(seconds)
            return not self._listener.is_alive()

        if not wait_while_working(
            process.pid,
            has_ended,
            STALLED_SECONDS,
            self._timeout,
            lambda: self._heard,
            self._time_left,
        ):
            limit = "tracker.timeout" if self._time_left() > 0 else "shutdown.timeout"
            self._warn(
                f"wandb did not end in time ({limit}); what it had recorded is in the run's folder"
            )
            process.give_up()
        # The process has told that it is done, or it has ended, which closes the pipes.
        for thread in (self._sender, self._listener):
            thread.join(STALLED_SECONDS)
        if self._more_follow and self._takes_more:
            recorder_process.keep(process)
        else:
            process.end()
        if self._record and not wandb_record.gets_end(Path(self._record)):
            self._warn(
                "wandb's record of this run is not complete, because its disk was full; the run's "
                "own rows are"
            )

    def _thread(self, target: Any, stream: IO[str]) -> threading.Thread:
        thread = threading.Thread(target=target, args=(stream,), name="wandb", daemon=True)
        thread.start()
        return thread

    def _send(self, stream: IO[str]) -> None:
        """Pass messages on until the end of the run, or until the process is gone."""
        try:
            while (message := self._outbox.get()) is not None:
                stream.write(json.dumps(message) + "\n")
                self._passed += len(message.get("row", ()))
                if self._outbox.empty():
                    stream.flush()
            stream.flush()
        except OSError:
            """The listener notices the end of the process too, and logs it."""

    def _listen(self, stream: IO[str]) -> None:
        """Log the messages of the process until it is done with the run, or gone."""
        while line := stream.readline():  # an iterator would read on into the next run
            self._heard += 1
            message = json.loads(line)
            match message["kind"]:
                case "warning":
                    self._warn(message["text"])
                case "info":
                    log.info("%s", message["text"])
                case "done" | "last" as kind:
                    self._takes_more = kind == "done"
                    self._record = message["text"]
                    return
        self._warn("wandb's process ended unexpectedly; the run's own files are complete")

    def _warn(self, text: str) -> None:
        """Log the first warning only: the others follow from it."""
        if not self._warned:
            self._warned = True
            log.warning("%s", text)


def _flat(summary: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of a nested summary, keys joined by slashes: wandb shows flat ones."""
    for key, value in summary.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}/")
        else:
            yield name, spelled(value)
