"""The job's part of a composition as plain containers, every reference resolved."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.compose.diagnose import reason
from runner.config.folders import outputs
from runner.config.problem import Problem


def resolved(config: DictConfig, number: int | None) -> tuple[dict[str, Any], list[Problem]]:
    """The job's part of ``config`` as plain containers, and what cannot be resolved in it."""
    job = copy.deepcopy(config)
    with open_dict(job):
        if number is not None:  # what the launcher of a sweep sets
            job.hydra.job.num, job.hydra.job.id = number, number
        job.hydra.runtime.output_dir = str(outputs())
        HydraConfig.instance().set_config(job)
        job = copy.deepcopy(job)
        del job["hydra"]
    try:
        return _container(job, resolve=True), []
    except OmegaConfBaseException:
        problems = list(_unresolved(job, ""))
        plain = _container(job, resolve=False)
        return plain, problems


def _container(config: DictConfig, resolve: bool) -> dict[str, Any]:
    content = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _unresolved(node: Any, path: str) -> Iterator[Problem]:
    """Each value below ``node`` that refers to something which is not there."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    items = raw.items() if isinstance(raw, dict) else enumerate(raw or ())
    for key, value in items:
        where = f"{path}.{key}" if path else str(key)
        try:
            content = node[key]
        except (OmegaConfBaseException, HydraException, ValueError, TypeError) as error:
            if not OmegaConf.is_missing(node, key):
                yield Problem(where, value, f"cannot be resolved: {reason(error)}")
            continue
        if OmegaConf.is_config(content):
            yield from _unresolved(content, where)
