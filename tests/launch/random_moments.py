"""Ask a short run to stop at random moments, from its first import to its last write.

    python -m tests.launch.random_moments --count 60 --seed 0

After each end, every file of the run must be readable, its status must fit the exit code, and
nothing may be left behind. It prints a line for each moment; the exit code is 1 if one was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from tests.launch.ends import Started, started

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 143}
PLUGINS = {
    "single": [],
    "ddp": ["plugin=ddp", "plugin.nproc=2"],
    "fsdp": ["plugin=fsdp", "plugin.nproc=2"],
}
SHORT = ["train.max_duration=30ba", "eval.interval=10ba", "data.batch_size=16", "log.flush=5"]


def wrong(run: Started, number: signal.Signals | None) -> Iterator[str]:
    """Yield what is wrong with a run that ended after a signal; None for no signal."""
    code = run.process.returncode
    allowed = {0} if number is None else {0, CODES[number]}
    if code not in allowed:
        yield f"exit code {code}"
    if "Traceback" in run.printed:
        yield run.printed
    yield from (f"left behind: {one}" for one in run.left())
    for file in (run.home / "outputs").rglob("*"):
        try:
            match file.suffix:
                case ".json":
                    json.loads(file.read_text())
                case ".jsonl":
                    text = file.read_text()
                    steps = [json.loads(line)["train/step"] for line in text.splitlines()]
                    if text[-1:] not in ("", "\n") or steps != [*range(1, len(steps) + 1)]:
                        yield f"{file}: torn"
                case ".yaml":
                    yaml.safe_load(file.read_text())
                case ".part":
                    yield f"{file}: left behind"
        except ValueError as error:
            yield f"{file}: {error}"
        except yaml.YAMLError as error:
            yield f"{file}: {error}"
    for file in run.home.glob("outputs/runs/*/status.json"):
        status = json.loads(file.read_text())
        state = "finished" if code == 0 else "interrupted"
        if (status["state"], status["exit_code"]) != (state, code):
            yield f"exit code {code}, but {status['state']} with {status['exit_code']}"


def strike(home: Path, plugin: str, number: signal.Signals | None, after: float) -> list[str]:
    """Start a run, send it a signal, and return what is wrong with its end.

    Args:
        home: folder for the run.
        plugin: how it trains.
        number: the signal; None for none.
        after: seconds from the first import of the run to the signal.
    """
    environment = environ(home)
    with started(environment, [*PLUGINS[plugin], *SHORT]) as run:
        run.wait_for_handlers()
        if number is not None:
            time.sleep(after)
            run.process.send_signal(number)
        run.process.wait(120)
        return list(wrong(run, number))


def environ(home: Path) -> Mapping[str, str]:
    """Return environment variables of a run whose files are in ``home``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "RUNNER_"))}
    return kept | {
        "RUNNER_OUTPUTS": str(home / "outputs"),
        "HOME": str(home),
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }


def moments(count: int, seed: int, plugins: list[str]) -> int:
    """Strike ``count`` runs, and return how many ended in a wrong way."""
    chance, failed, whole = random.Random(seed), 0, {}
    for place in range(count):
        plugin = plugins[place % len(plugins)]
        number = chance.choice([*CODES])
        with tempfile.TemporaryDirectory() as folder:
            if plugin not in whole:
                began = time.monotonic()
                (Path(folder) / "whole").mkdir()
                found = strike(Path(folder) / "whole", plugin, None, 0)
                assert not found, found
                whole[plugin] = time.monotonic() - began
            after = chance.uniform(0, whole[plugin])
            (Path(folder) / "struck").mkdir()
            found = strike(Path(folder) / "struck", plugin, number, after)
        failed += bool(found)
        ended = "; ".join(found) or "as it should"
        print(f"{place}: {plugin} {number.name} after {after:.2f} s: {ended}", flush=True)
    print(f"{failed} of {count} ended in a wrong way (seed {seed})")
    return failed


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plugins", nargs="+", default=[*PLUGINS], choices=[*PLUGINS])
    given = parser.parse_args()
    return int(moments(given.count, given.seed, given.plugins) > 0)


if __name__ == "__main__":
    sys.exit(main())
