"""The process that records runs with wandb, one after the other. It is started by its path,
with a folder for temporary files and the number of the trainer's process.

It imports only the standard library and wandb, and plotly for figures. It reads JSON lines from
standard input: of each run the request, the rows or figures, and the end. It answers with JSON
lines on standard output; the last one of a run tells whether the process can record another one.

It is a process of its own because wandb may block without limit, and only a process can be killed.
With wandb 0.31 the client ignores the time limit of finishing if about ten megabytes wait for a
server that hangs (500 rows of 1000 layers, or 20 000 rows of 20 metrics).
The process also starts in parallel with the training, and it outlives a trainer that is killed, so
that its run is marked as failed too. Its time is bounded once its input ends.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from wandb import Run

Mode = Literal["online", "offline", "disabled"]
Inbox = queue.Queue[dict[str, Any] | None]

MOST_MESSAGES = 1000
"""Messages that were read and not passed to wandb yet."""

STUCK_SECONDS = 2.0
"""Seconds after the time limit of finishing at which wandb's client is taken for stuck."""

ORPHAN_SECONDS = 0.5
"""Seconds between two checks whether the trainer still runs."""

_ALIASES: dict[str, Mode] = {"run": "online", "shared": "online", "dryrun": "offline"}
"""Other names that wandb has for a mode."""


def effective_mode(mode: str) -> Mode:
    """Return the mode in which a run is recorded."""
    asked = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
    if asked:
        return _known(asked)
    wandb = _quiet_wandb()
    written_down = _known(wandb.setup().settings.mode)
    if written_down != "online":
        return written_down
    try:
        known = wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError:
        # There are credentials of a wrong form: the attempt to go online logs one warning.
        known = True
    return "online" if known else "offline"


def _known(word: str) -> Mode:
    return _ALIASES.get(word, word)  # type: ignore[arg-type]  # wandb refuses other modes


class Recorder:
    """Record one run, online if that works within the time limits, offline otherwise."""

    def __init__(self, request: dict[str, Any], say: Callable[[str, str], None]) -> None:
        self._request = request
        self._say = say
        self._complaints: list[str] = []
        self._run: Run | None = None
        self._earlier = set(self._begun())  # records of the run that this one continues
        mode = effective_mode(request["mode"])
        if mode == "online":
            try:
                self._run = self._open(mode)
                self._say("info", f"wandb: {self._run.url}")
            except Exception as error:
                self._give_up_online(error)
                mode = "offline"
        if mode == "offline":
            self._run = self._open(mode)
        say("info", f"wandb: {mode} (tracker.mode={request['mode']})")

    @property
    def offline_file(self) -> str:
        """Path of the file of a run that is recorded offline; empty for another run."""
        run = self._run
        if run is None or not run.offline:
            return ""
        return str(Path(run.dir).parent / f"run-{run.id}.wandb")

    def write(self, row: dict[str, int | float]) -> None:
        """Log one row, without ``step=``, which would keep the row open for later keys."""
        if self._run is not None:
            self._run.log(row)

    def draw(self, figures: dict[str, Any]) -> None:
        """Log figures of plotly, in the form of JSON."""
        if self._run is not None:
            import wandb
            from plotly.graph_objects import Figure

            self._run.log({key: wandb.Plotly(Figure(one)) for key, one in figures.items()})

    def end(self, summary: dict[str, Any] | None, exit_code: int) -> bool:
        """Finish the run; return False if wandb's client is stuck."""
        run = self._run
        if run is None:
            return True
        if summary:
            run.summary.update(summary)

        def finish() -> None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:
                self._complaints.append(str(error))

        finishing = threading.Thread(target=finish, daemon=True)
        finishing.start()
        finishing.join(self._seconds("finish_seconds", run.offline) + STUCK_SECONDS)
        stuck = finishing.is_alive()
        if stuck or (self._complaints and not run.offline):
            why = "its client is stuck" if stuck else self._complaints[0]
            place = Path(run.dir).parent
            self._say(
                "warning",
                f"wandb did not send the whole run ({why}); it is complete in {place}. "
                f"To send it later: wandb sync {place}",
            )
        return not stuck

    def _open(self, mode: Mode) -> Run:
        request = self._request
        wandb = _quiet_wandb(self._complaints)
        run: Run = wandb.init(
            **request["run"],
            mode=mode,
            settings=_settings(
                wandb,
                self._seconds("init_seconds", mode == "offline"),
                self._seconds("finish_seconds", mode == "offline"),
            ),
        )
        run.define_metric(request["step"])
        run.define_metric("*", step_metric=request["step"])
        self._complaints.clear()  # later ones are about sending
        return run

    def _seconds(self, limit: str, offline: bool) -> float:
        """Return a limit in seconds; the machine may take its time where no server is waited
        for.
        """
        seconds: float = self._request["timeout" if offline else limit]
        return seconds

    def _give_up_online(self, error: Exception) -> None:
        import wandb

        # wandb's client keeps the id of a run that failed to start until a new client starts.
        wandb.teardown()
        for begun in set(self._begun()) - self._earlier:
            shutil.rmtree(begun, ignore_errors=True)
        place = self._request["record"]
        why = str(error).strip().splitlines() or [type(error).__name__]
        self._say(
            "warning",
            f"wandb cannot record online ({why[0]}); this run is recorded offline in {place}. "
            f"To send it later: wandb sync {place}/offline-run-*",
        )

    def _begun(self) -> Iterator[Path]:
        """Yield the records of this run that were begun online."""
        run_id = self._request["run"]["id"]
        yield from Path(self._request["record"]).glob(f"run-*-{run_id}")


class _Relay:
    """Collect the warnings and errors of wandb, without colours and prefix."""

    def __init__(self, complaints: list[str]) -> None:
        self._complaints = complaints

    def info(self, message: str) -> None:
        """Drop it."""

    def warning(self, message: str) -> None:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
        self._complaints.append(re.sub(r"^(wandb: )?((WARNING|ERROR) )?", "", plain))

    error = warning


def _begin_client() -> None:
    """Import wandb and start its client, for whatever runs are going to ask for."""
    with suppress(Exception):
        _quiet_wandb().setup().ensure_service()


def _quiet_wandb(complaints: list[str] | None = None) -> Any:
    """Return the wandb module, set up to print nothing and so to prompt for nothing."""
    import wandb

    silent = wandb.Settings(silent=True, **_known_settings(wandb, {"x_service_wait": 600.0}))
    relay = _Relay([] if complaints is None else complaints)
    wandb.termsetup(silent, relay)
    wandb.setup(settings=silent)  # points wandb's messages back to the terminal
    wandb.termsetup(silent, relay)
    return wandb


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has a GPU that wandb can watch, without importing torch."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def _settings(wandb: Any, init_seconds: float, finish_seconds: float) -> Any:
    """Return new settings for one run; wandb changes the object."""
    wanted = {
        "silent": True,
        "console": "off",
        "reinit": "create_new",
        "init_timeout": init_seconds,
        "finish_timeout": finish_seconds,
        "finish_timeout_raises": True,
        "program": "clip-runner",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "x_disable_meta": True,
        "x_disable_stats": not has_gpu(),
        "x_stats_pid": os.getppid(),  # the trainer, whose share of the GPU is shown
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        # A killed machine loses a second of the record instead of fifteen.
        "x_transaction_log_flush_interval": 1.0,
    }
    return wandb.Settings(**_known_settings(wandb, wanted))


def _known_settings(wandb: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that this version of wandb has: its private ones come and go."""
    known = wandb.Settings.model_fields
    return {key: value for key, value in wanted.items() if key in known}


def _send(stream: IO[str], kind: str, text: str = "") -> None:
    """Send a message to the trainer as one JSON line, at once."""
    with suppress(OSError):  # The trainer is gone; the record goes on.
        stream.write(json.dumps({"kind": kind, "text": text}) + "\n")
        stream.flush()


def _read(stream: IO[str], inbox: Inbox) -> None:
    for line in stream:
        if not line.endswith("\n"):
            break
        inbox.put(json.loads(line))
    inbox.put(None)


def _watch(trainer: int, stream: IO[str], inbox: Inbox) -> None:
    """End the input when the trainer is gone: a process that it forked may hold the pipe open."""
    while os.getppid() == trainer:
        time.sleep(ORPHAN_SECONDS)
    while select.select([stream], [], [], 0)[0]:  # its last messages are not read yet
        time.sleep(ORPHAN_SECONDS)
    time.sleep(ORPHAN_SECONDS)
    inbox.put(None)


def _own_streams() -> tuple[IO[str], IO[str]]:
    """Return standard input and output, and hide them from wandb."""
    source, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return os.fdopen(source, encoding="utf-8"), os.fdopen(answers, "w", encoding="utf-8")


def _record(request: dict[str, Any], inbox: Inbox, say: Callable[[str, str], None]) -> bool:
    """Record one run, and return whether the process can record another one."""
    complete = takes_more = True
    record = ""
    try:
        recorder = Recorder(request, say)
        record = recorder.offline_file
        while (message := inbox.get()) is not None and "summary" not in message:
            if "figures" in message:
                recorder.draw(message["figures"])
            else:
                recorder.write(message["row"])
        # A trainer that sent no end was killed.
        end = message or {"summary": None, "exit_code": 1}
        complete = recorder.end(end["summary"], end["exit_code"])
        takes_more = complete and message is not None
    except Exception as error:
        say("warning", f"wandb records no more of this run: {type(error).__name__}: {error}")
        takes_more = False
    say("done" if takes_more else "last", record)
    if not complete:
        _remove_scratch()
        os._exit(1)  # the exit handler of wandb would wait for the client
    return takes_more


def _remove_scratch() -> None:
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def main() -> None:
    """Record the runs of standard input, then exit, even if wandb still works."""
    # The trainer may be gone before this process could ask for its parent.
    trainer = int(sys.argv[2])
    tempfile.tempdir = sys.argv[1]
    atexit.register(_remove_scratch)  # after the exit handlers of wandb
    # A signal to the whole job ends the trainer, which then sends the end of the run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    source, answers = _own_streams()
    # Bounded: a backlog waits with the trainer, which knows what to do about it.
    inbox: Inbox = queue.Queue(MOST_MESSAGES)
    threading.Thread(target=_read, args=(source, inbox), daemon=True).start()
    threading.Thread(target=_watch, args=(trainer, source, inbox), daemon=True).start()
    _begin_client()
    while (request := inbox.get()) is not None:
        if not _record(request, inbox, partial(_send, answers)):
            return


if __name__ == "__main__":
    main()
