"""A job of a composition, checked; and its configuration as it is recorded: without secrets.

Training uses the resolved configuration. Files, pages and wandb get the recorded form, in which
values of the environment stay references.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.config.composer import Composed, Composer, reason, refer_to
from runner.config.folders import Refusal, read_yaml
from runner.config.identity import MASK, NOT_HASHED, config_hash, masked, masked_words
from runner.config.plugin_section import read_plan
from runner.config.problem import NOTHING, Problem, RequestError, leaves
from runner.config.schema import RunConfig, examine


@dataclass(frozen=True)
class Job:
    """One training job of a request."""

    config: RunConfig
    plain: dict[str, Any]  # as it is recorded
    words: tuple[str, ...] = ()  # its overrides
    apart: tuple[str, ...] = ()  # overrides that set it apart from the other jobs

    @property
    def label(self) -> str:
        return " ".join(masked_words(self.apart))

    @cached_property
    def hash(self) -> str:
        return config_hash(self.plain)


def job_of(made: Composed, folder: Path, number: int | None = None) -> Job:
    """Return the job of a composition, in its folder or as this ``number`` of a sweep.

    A RequestError says everything that is wrong with it.
    """
    hydra, problems = made.config.hydra, [*made.problems]
    if number is not None:  # as the launcher of a sweep does
        hydra.job.update(num=number, id=str(number))
    hydra.runtime.output_dir = str(folder)
    refer_to(made.config)
    config = copy.deepcopy(made.config)
    with open_dict(config):
        del config.hydra
    try:
        resolved, plain = resolved_and_recorded(config)
    except OmegaConfBaseException as error:  # a value refers to something that does not exist
        written: Any = OmegaConf.to_container(config)
        resolved = plain = written
        key = str(error.full_key)
        text = dict(leaves("", written)).get(key, NOTHING)
        problems.append(Problem(key, text, f"cannot be resolved: {reason(error)}"))
    typed, found = examine(resolved, made.unsettled)
    known = {one.key for one in problems}
    problems += (one for one in found if one.key not in known)
    if typed is None or problems:
        raise RequestError(problems)
    words: Any = OmegaConf.to_container(hydra.overrides.task)
    return Job(typed, plain, tuple(words))


def resolved_and_recorded(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job's configuration in plain containers: resolved, and as it is recorded."""
    written: Any = OmegaConf.to_container(config, resolve=False)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    clip, plugin = resolved.get("clip"), resolved.get("plugin")
    if isinstance(clip, dict) and isinstance(clip.get("_target_"), str):
        clip["mode"] = clip["_target_"].rpartition(".")[2]
    if isinstance(plugin, dict) and isinstance(plugin.get("tp_plan"), str):
        # Ranks and the record get the plan, not the path of its file; the check says what is wrong.
        with suppress(ValueError):
            plugin["tp_plan"] = read_plan(plugin["tp_plan"])
    # What is resolved from a secret, or from the environment, stays as it is written, and so does
    # every value that quotes one.
    texts = dict(leaves("", written))
    secrets = {
        str(value)
        for key, value in leaves("", resolved)
        if "oc.env:" in str(texts.get(key)) or masked({key: value})[key] == MASK
    }

    def recorded(text: Any, value: Any) -> Any:
        if isinstance(text, dict) and isinstance(value, dict):
            return {key: recorded(text.get(key), one) for key, one in value.items()}
        if isinstance(text, list):
            return [recorded(*pair) for pair in zip(text, value, strict=True)]
        quotes = "oc.env:" in str(text) or any(one and one in str(value) for one in secrets)
        return text if "${" in str(text) and quotes else value

    return resolved, masked(recorded(written, resolved))


def write_composition(home: Path) -> None:
    """Write the files of the run that Hydra has just begun to ``home``, but without secrets."""
    content = unresolved_composition(HydraConfig.instance().cfg)
    hydra = content.pop("hydra")
    home.mkdir(exist_ok=True)
    parts = {"config": content, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    for name, part in parts.items():
        (home / f"{name}.yaml").write_text(as_yaml(part), encoding="utf-8")


def unresolved_composition(config: Any) -> dict[str, Any]:
    """Return a composition in plain containers, references unresolved, without secrets."""
    content: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    job, overrides = content["hydra"]["job"], content["hydra"]["overrides"]
    for name in job["env_copy"]:  # Hydra has copied the values into env_set
        job["env_set"][name] = f"${{oc.env:{name}}}"
    for part, words in overrides.items():
        overrides[part] = masked_words(words)
    job["override_dirname"] = ",".join(overrides["task"])
    return dict(masked(content))


def as_yaml(content: Any) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


def recorded(file: Path, given: Sequence[str], config_dir: Path | None = None) -> Job:
    """Return the job that the configuration file of a run describes, with overrides."""
    try:
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise Refusal(f"{file} holds no configuration")
    except Refusal as error:
        raise RequestError([Problem("RUN", str(file.parent), str(error))]) from None
    composer = Composer(config_dir)
    with composer.active():
        overrides, problems = composer.read(given)
        text = "must be one value of this run's configuration: the run is trained already"
        wrong = [
            one
            for one in overrides
            if one.is_sweep_override() or one.is_hydra_override() or one.key_or_group == "recipe"
        ]
        problems += (Problem(one.key_or_group, one.get_value_string(), text) for one in wrong)
        made = composer.compose([one for one in overrides if one not in wrong], content)
        made.problems += problems
        for key, value in leaves("", OmegaConf.to_container(made.config)):
            if value == MASK and key.partition(".")[0] not in NOT_HASHED:
                text = f"is a secret, which is not recorded: give it again ({key}=VALUE)"
                made.problems.append(Problem(key, NOTHING, text))
        return job_of(made, file.parent)
