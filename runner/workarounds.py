"""What this project does because another program has a fault or a gap: each once, in one function.

Each function says when it can be taken out. Nothing is imported before it is needed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any


def forget_interrupt() -> None:
    """Let Python end by the exit code of the program, although an interrupt was handled.

    CPython ends by SIGINT if an interrupt met code that was executed from a string, as dataclasses
    are made (``unhandled_keyboard_interrupt``, https://bugs.python.org/issue1054041). Executing
    another string clears that. Until CPython forgets an interrupt that was caught.
    """
    exec("")


def search_no_plugins_of_pydantic() -> None:
    """Keep pydantic from reading the metadata of all installed packages when it is imported.

    That takes as long as the check of a request (https://docs.pydantic.dev/latest/concepts/plugins/).
    Until pydantic searches only where a plugin is asked for.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def forget_launchers_of_packages(names: Iterable[str]) -> None:
    """Remove the options of Hydra's launchers that have the names of our files.

    Hydra's ConfigStore would add the options of the packages to them. Until a file of a primary
    configuration replaces an option of the store.
    """
    from hydra.core.config_store import ConfigStore

    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for name in names:
        launchers.pop(name, None)


def start_processes_as_python_does() -> None:
    """Reset how this process starts others: ranks do not know the method of joblib's workers.

    Until loky no longer sets a start method of its own in them.
    """
    import multiprocessing

    multiprocessing.set_start_method(None, force=True)


def limit_groups_of_meshes(timeout: timedelta) -> None:
    """Give the process groups of device meshes the time-out of the default group.

    ``init_device_mesh`` takes none, so they would have torch's 30 minutes. Until it does.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timeout


def let_gloo_drop_tensors() -> None:
    """Wait a moment after the process group is destroyed.

    Threads of gloo drop the tensors of the last collectives, which fails when Python is gone.
    Until ``destroy_process_group`` waits for them.
    """
    time.sleep(0.1)


def import_pandas_before_wandb() -> None:
    """Import pandas, if it is there, before a thread of wandb does.

    Another library, such as plotly, would find half of the module. Until wandb imports it in the
    thread that imports wandb.
    """
    with suppress(ImportError):
        import pandas  # noqa: F401


def stop_client_of_wandb(wandb: Any) -> None:
    """Let the next run of this process start another client.

    A client keeps the id of a run that failed to start, and so refuses it. Until wandb's ``init``
    takes the id back when it raises.
    """
    wandb.teardown()


def kill_client_of_wandb() -> None:
    """Kill wandb's client, which wandb 0.31 may wait for without limit when the program exits.

    Until ``finish_timeout`` holds for the exit too.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            process, name, _, parent, *_ = stat.read_text(errors="replace").split()
            if name == "(wandb-core)" and int(parent) == os.getpid():
                os.kill(int(process), signal.SIGKILL)
