"""The process that speaks to wandb for one run. :class:`WandbSink` starts it by its path.

It stands alone (standard library and wandb) and reads JSON lines from standard input: the request,
then rows, then the end of the run. What it has to say goes back as JSON lines on standard output.

Why a process of its own: wandb can be waited for without limit (its client forgets the time limit
of finishing once some ten megabytes are stuck behind a server that hangs; seen with 0.31: 500 rows
of 1000 layers, or 20 000 rows of 20 figures), and only a process can be given up.
It also starts while training starts, and it outlives a trainer that is killed, so that even that
run is marked as failed. Once its input ends it has a bounded time left.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from wandb import Run

Mode = Literal["online", "offline", "disabled"]

STUCK_SECONDS = 2.0
"""This long after the limit of finishing, wandb's client does not keep to it, and is left."""

ORPHAN_SECONDS = 0.5
"""Between two looks whether the trainer is still there."""

_OTHER_WORDS: dict[str, Mode] = {"run": "online", "shared": "online", "dryrun": "offline"}
"""What else wandb calls a mode."""


def effective_mode(mode: str) -> Mode:
    """The mode that a run gets.

    ``auto`` is what ``WANDB_MODE`` or wandb's settings files say; where they say nothing, online if
    credentials for the configured server are at hand (``WANDB_API_KEY``, an identity token, a
    netrc entry, the settings files), else offline. No server is asked and no one is prompted.

    Args:
        mode: auto, or one of the modes.
    """
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
        # Credentials are there but have the wrong form; going online says so, in one warning.
        known = True
    return "online" if known else "offline"


def _known(word: str) -> Mode:
    return _OTHER_WORDS.get(word, word)  # type: ignore[arg-type]  # wandb refuses other words


class Recorder:
    """One wandb run, online where that works within the limits, offline otherwise.

    Args:
        request: the arguments of :class:`WandbSink`, by name, and the two limits.
        say: takes a kind ("info" or "warning") and a text for the trainer's log.
    """

    def __init__(self, request: dict[str, Any], say: Say) -> None:
        self._request = request
        self._say = say
        self._complaints: list[str] = []
        self._run: Run | None = None
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

    def write(self, row: dict[str, int | float]) -> None:
        """Log one row. Without ``step=``, which would keep the row open for later keys to join."""
        if self._run is not None:
            self._run.log(row)

    def end(self, summary: dict[str, Any] | None, exit_code: int) -> bool:
        """Finish the run; False if wandb's client got stuck and has to be left behind.

        Args:
            summary: flat.
            exit_code: of the run.
        """
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
        finishing.join(self._request["finish_seconds"] + STUCK_SECONDS)
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
            dir=request["folder"],
            mode=mode,
            project=request["project"],
            group=request["group"],
            tags=request["tags"],
            job_type=request["job_type"],
            name=request["name"],
            id=request["run_id"],
            config=request["config"],
            settings=_settings(wandb, request["init_seconds"], request["finish_seconds"]),
        )
        run.define_metric(request["step"])
        run.define_metric("*", step_metric=request["step"])
        self._complaints.clear()  # from here on they are about sending
        return run

    def _give_up_online(self, error: Exception) -> None:
        import wandb

        # wandb's client keeps the id of a run that failed to start; only a new client frees it.
        wandb.teardown()
        place = Path(self._request["record"])
        for begun in place.glob(f"run-*-{self._request['run_id']}"):
            shutil.rmtree(begun, ignore_errors=True)
        why = str(error).strip().splitlines() or [type(error).__name__]
        self._say(
            "warning",
            f"wandb cannot record online ({why[0]}); this run is recorded offline in {place}. "
            f"To send it later: wandb sync {place}/offline-run-*",
        )


class Say:
    """Sends words to the trainer as JSON lines; a trainer that is gone hears nothing."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, kind: str, text: str = "") -> None:
        """Send one line, at once."""
        try:
            self._stream.write(json.dumps({"kind": kind, "text": text}) + "\n")
            self._stream.flush()
        except OSError:
            """Nobody is left to tell; the record itself goes on."""


class _Relay:
    """Keeps the warnings and errors that wandb would print, without their colours and prefix."""

    def __init__(self, complaints: list[str]) -> None:
        self._complaints = complaints

    def info(self, message: str) -> None:
        """Chatter."""

    def warning(self, message: str) -> None:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
        self._complaints.append(re.sub(r"^(wandb: )?((WARNING|ERROR) )?", "", plain))

    error = warning


def _quiet_wandb(complaints: list[str] | None = None) -> Any:
    """The wandb module, set up to print nothing, hence to prompt for nothing."""
    import wandb

    silent = wandb.Settings(silent=True)
    relay = _Relay([] if complaints is None else complaints)
    wandb.termsetup(silent, relay)
    wandb.setup(settings=silent)  # points wandb's messages back to the terminal
    wandb.termsetup(silent, relay)
    return wandb


def _settings(wandb: Any, init_seconds: float, finish_seconds: float) -> Any:
    """Fresh settings for one run. wandb changes the object, so it serves one run only.

    What describes the machine, the command line, the code or the environment stays out: secrets
    get typed as arguments, and the run folder holds what is needed.
    """
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
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        # A killed machine loses a second of the record instead of fifteen.
        "x_transaction_log_flush_interval": 1.0,
    }
    known = wandb.Settings.model_fields  # the flush interval is younger than the rest
    return wandb.Settings(**{key: value for key, value in wanted.items() if key in known})


def _read(stream: IO[str], inbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in stream:
        if not line.endswith("\n"):
            break
        inbox.put(json.loads(line))
    inbox.put(None)


def _watch(trainer: int, inbox: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """End the input when the trainer is gone: a process it forked may hold the pipe open."""
    while os.getppid() == trainer:
        time.sleep(ORPHAN_SECONDS)
    time.sleep(ORPHAN_SECONDS)  # what it sent last is read meanwhile
    inbox.put(None)


def _own_streams() -> tuple[IO[str], IO[str]]:
    """Standard input and output for this process alone.

    wandb's client inherits descriptors 0 to 2; it would hold our pipes open and could write into
    them.
    """
    given, told = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return os.fdopen(given, encoding="utf-8"), os.fdopen(told, "w", encoding="utf-8")


def main() -> None:
    """Record one run from standard input, then end this process whatever wandb still does."""
    trainer = os.getppid()
    # A signal to the whole job ends the trainer, which then says here how the run ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given, told = _own_streams()
    say = Say(told)
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(given, inbox), daemon=True).start()
    threading.Thread(target=_watch, args=(trainer, inbox), daemon=True).start()
    request = inbox.get()
    if request is None:
        return
    complete = True
    try:
        recorder = Recorder(request, say)
        while (message := inbox.get()) is not None and "row" in message:
            recorder.write(message["row"])
        # A trainer that went without a word was killed.
        end = message or {"summary": None, "exit_code": 1}
        complete = recorder.end(end["summary"], end["exit_code"])
    except Exception as error:
        say("warning", f"wandb records no more of this run: {type(error).__name__}: {error}")
    say("done")
    if not complete:
        os._exit(1)  # wandb's own exit handler would wait for the stuck client


if __name__ == "__main__":
    main()
