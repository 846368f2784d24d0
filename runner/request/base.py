"""The recorded configuration of a run, from which a request starts: ``resume=RUN``, ``evaluate``.

What is typed changes it. Sections that are about one command or one sweep are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.environment import started_rank
from runner.config.folders import Refusal, read_yaml
from runner.config.identity import NO_PATH, NOT_HASHED, branching
from runner.config.masking import is_recorded
from runner.config.problem import NOTHING, Problem, RequestError, leaves
from runner.config.reading import DamagedFile
from runner.run_folder import files
from runner.run_folder.strict_json import decode_file

_OF_ONE_COMMAND = ("resume", "trust", "report")


def source_of(config: DictConfig) -> str | None:
    """Return the path of a run or a checkpoint that ``resume`` names; None if it names none."""
    with suppress(OmegaConfBaseException):  # the check of the job reports it
        source = OmegaConf.select(config, "resume.from")
        if isinstance(source, str) and source not in NO_PATH:
            return source
    return None


def base_of(source: str) -> dict[str, Any]:
    """Return the configuration that a run which continues from ``source`` starts from.

    The run has recorded it, or a checkpoint that lies elsewhere. It is empty if neither exists or
    tells it, which is refused where the run would start.
    """
    path = Path(source).expanduser().absolute()
    branch = branching(source)
    if not os.path.exists(path) and branch:
        path = Path(branch[0]).expanduser().absolute()
    run = _run_of(path)
    if os.path.exists(run / files.CONFIG):
        content = configuration(run / files.CONFIG, "resume", source)
    else:
        content = _of_checkpoint(path)
    base = {key: value for key, value in content.items() if key not in _OF_ONE_COMMAND}
    _leave_sweep(base, run)
    plugin = base.get("plugin")
    if started_rank() is not None and isinstance(plugin, dict):  # the ranks that are there
        base["plugin"] = plugin | {"nproc": None, "nnodes": None}
    return base


def configuration(file: Path, key: str, value: str) -> dict[str, Any]:
    """Return the content of a run's ``config.yaml``; ``key`` is what the user named the run by."""
    try:
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise Refusal(f"{file} holds no configuration")
    except Refusal as error:
        raise RequestError([Problem(key, value, str(error))]) from None
    return content


def unrecorded_secrets(config: DictConfig) -> Iterator[Problem]:
    """Yield the secrets that a record masks and the run would need."""
    for key, value in leaves("", OmegaConf.to_container(config)):
        if not is_recorded(str(value)) and key.partition(".")[0] not in (*NOT_HASHED, "hydra"):
            message = f"is a secret, which is not recorded: give it again ({key}=???)"
            yield Problem(key, NOTHING, message)


def _run_of(path: Path) -> Path:
    """Return the folder of the run that a path means: itself, or above its checkpoints."""
    if path.name == files.CHECKPOINTS:
        return path.parent
    if path.parent.name == files.CHECKPOINTS:
        return path.parent.parent
    return path


def _of_checkpoint(path: Path) -> dict[str, Any]:
    """Return the configuration in a manifest: of a checkpoint, or of the newest one below."""
    if not os.path.exists(path):
        return {}
    manifests = [path / files.MANIFEST]
    for folder in (path / files.CHECKPOINTS, path):
        manifests += sorted(folder.glob(f"step_*/{files.MANIFEST}"), reverse=True)
    for manifest in manifests:
        with suppress(DamagedFile, OSError, ValueError):  # loading it reports that
            content = decode_file(manifest).get("config")
            if isinstance(content, dict):
                return content
    return {}


def _leave_sweep(base: dict[str, Any], run: Path) -> None:
    """Remove what a run has only as a part of a sweep: names, and keys that advance together."""
    sweep = base.get("sweep")
    if isinstance(sweep, dict):
        base["sweep"] = sweep | {"name": None, "zip": []}
    tracker = base.get("tracker")
    name = run.parent.name
    if isinstance(tracker, dict) and (run.parent / files.SWEEP).exists():
        if tracker.get("group") == name:
            tracker["group"] = None
        if tracker.get("tags") == [name[:64]]:
            tracker["tags"] = []
