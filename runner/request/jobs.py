"""Jobs: compositions that are checked and resolved, and the form in which they are recorded.

Training uses the resolved configuration. Files, pages and wandb get the recorded form, in which
values of the environment stay references, and secrets are masked.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.config.check import examine
from runner.config.identity import config_hash
from runner.config.masking import masked, masked_words, remember, secrets_in
from runner.config.plugin_section import read_plan
from runner.config.problem import NOTHING, Problem, RequestError, leaves
from runner.config.schema import RunConfig
from runner.config.trust import Recorded, unknown
from runner.request.composition import Composition, reason


@dataclass(frozen=True)
class Job:
    """One training job of a request."""

    config: RunConfig
    plain: dict[str, Any]  # as it is recorded
    overrides: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()  # overrides that set it apart from the other jobs
    targets: tuple[Recorded, ...] = ()  # from a record: their types are to be checked

    @property
    def label(self) -> str:
        """The overrides that set the job apart, secrets masked."""
        return " ".join(masked_words(self.varied))

    @cached_property
    def hash(self) -> str:
        """The hash of the recorded configuration."""
        return config_hash(self.plain)


def job_of(
    composition: Composition,
    folder: Path,
    number: int | None = None,
) -> Job:
    """Return the job of a composition, in its folder or as this ``number`` of a sweep.

    A RequestError says everything that is wrong with it.
    """
    hydra = composition.config.hydra
    if number is not None:  # as the launcher of a sweep does
        hydra.job.update(num=number, id=str(number))
    hydra.runtime.output_dir = str(folder)
    config = pickle.loads(pickle.dumps(composition.config))
    with open_dict(config):
        del config.hydra
    problems = list(composition.problems)
    try:
        resolved, plain = resolved_and_recorded(config)
    except OmegaConfBaseException as error:  # a value refers to something that does not exist
        written: Any = OmegaConf.to_container(config)
        resolved = plain = written
        key = str(error.full_key)
        text = dict(leaves("", written)).get(key, NOTHING)
        problems.append(Problem(key, text, f"cannot be resolved: {reason(error)}"))
    targets: list[Recorded] = []
    if composition.origin is not None and resolved.get("trust") is not True:
        targets = composition.origin.recorded(resolved)
        strange = unknown(targets)
        if strange:  # before the check imports the class of a mode
            raise RequestError(strange)
    typed, wrong_values = examine(resolved, composition.unsettled)
    keys = {problem.key for problem in problems}
    problems += [problem for problem in wrong_values if problem.key not in keys]
    if typed is None or problems:
        raise RequestError(problems)
    overrides: Any = OmegaConf.to_container(hydra.overrides.task)
    return Job(typed, plain, tuple(overrides), targets=tuple(targets))


def resolved_and_recorded(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job's configuration in plain containers: resolved, and as it is recorded."""
    written: Any = OmegaConf.to_container(config, resolve=False)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    clip = resolved.get("clip")
    if isinstance(clip, dict) and isinstance(clip.get("_target_"), str):
        clip["mode"] = clip["_target_"].rpartition(".")[2]
    plugin = resolved.get("plugin")
    if isinstance(plugin, dict) and isinstance(plugin.get("tp_plan"), str):
        # Ranks and the record get the plan, not the path of its file; the check says what is wrong.
        with suppress(ValueError):
            plugin["tp_plan"] = read_plan(plugin["tp_plan"])
    secrets = {*secrets_in(written), *secrets_in(resolved)} - {""}
    remember(secrets)
    # Values that others refer to, of the environment too: what quotes them stays a reference.
    referred = secrets | _from_environment(written, resolved)
    return resolved, masked(_recorded(written, resolved, referred), known=secrets)


def _recorded(written: Any, resolved: Any, referred: set[str]) -> Any:
    """Return a value as it is resolved, or as it is written if it quotes one of ``referred``."""
    if isinstance(written, dict) and isinstance(resolved, dict):
        return {
            name: _recorded(written.get(name), item, referred) for name, item in resolved.items()
        }
    if isinstance(written, list) and isinstance(resolved, list):
        pairs = zip(written, resolved, strict=True)
        return [_recorded(item_written, item, referred) for item_written, item in pairs]
    if "${" not in str(written):
        return resolved
    quotes = any(secret in str(resolved) for secret in referred)
    return written if quotes or "oc.env:" in str(written) else resolved


def _from_environment(written: Any, resolved: Any) -> set[str]:
    """Return the values that are written with a variable of the environment."""
    if isinstance(written, dict) and isinstance(resolved, dict):
        pairs = [(written.get(name), item) for name, item in resolved.items()]
    elif isinstance(written, list) and isinstance(resolved, list):
        pairs = list(zip(written, resolved, strict=True))
    else:
        return {str(resolved)} - {""} if "oc.env:" in str(written) else set()
    return set().union(*(_from_environment(item_written, item) for item_written, item in pairs))
