"""The folder that a calibration or a verification writes its file to."""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path

from runner.config.folders import obstacle, outputs
from runner.config.problem import Problem, RequestError


def new_folder(kind: str, file: str, key: str, given: Path | None) -> Path:
    """Return the folder, which can be written and does not hold ``file`` yet."""
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
    folder = given.absolute() if given else outputs() / f"{kind}s" / name
    message = obstacle(folder)
    if message is None and (folder / file).exists():
        message = f"holds an earlier {kind} ({file}); choose another name or remove it"
    if message is None:
        return folder
    key, value = (key, given) if given else ("RUNNER_OUTPUTS", outputs())
    raise RequestError([Problem(key, str(value), message)])
