"""The recorded configuration of a run, with overrides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.compose import diagnose
from runner.compose.composer import Composer, Source, plain_config, plain_word, reason
from runner.compose.jobs import Job
from runner.config.check import examine, leaves
from runner.config.identity import ENVIRONMENT, NOT_HASHED
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.secrets import MASK
from runner.config.values import Refusal
from runner.config.yaml_file import read_yaml


def recorded(file: Path, given: Sequence[str], source: Source | None = None) -> Job:
    """Return the job that the configuration file of a run describes, with overrides."""
    try:
        content = read_yaml(file)
    except Refusal as error:
        raise RequestError([Problem("RUN", str(file.parent), str(error))]) from None
    if not isinstance(content, dict):
        message = f"{file} holds no configuration"
        raise RequestError([Problem("RUN", str(file.parent), message)])
    content.pop(ENVIRONMENT, None)  # only to tell configurations apart
    config = OmegaConf.create(content)
    OmegaConf.set_struct(config, True)
    composer = Composer(source or Source(), given)
    with composer.active():
        overrides, problems = composer.read(given)
        overrides.sort(key=lambda override: not diagnose.chooses(override, composer.loader))
        for override in overrides:
            problem = _wrong(override, config, composer) or _apply(override, config, composer)
            problems += [problem] if problem else []
        try:
            plain = plain_config(config)
        except OmegaConfBaseException:
            raise RequestError([*problems, *diagnose.unresolved(config, "")]) from None
    problems += _masked(plain)
    typed, found = examine(plain)
    known = {problem.key for problem in problems}
    problems += [problem for problem in found if problem.key not in known]
    if problems or typed is None:
        raise RequestError(problems)
    return Job(typed, plain, tuple(given))


def _masked(plain: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each secret that is needed, and that the record does not have."""
    for key, value in leaves("", plain):
        if MASK in str(value) and key.partition(".")[0] not in NOT_HASHED:
            message = f"is a secret, which is not recorded: give it again ({key}=VALUE)"
            yield Problem(key, NOTHING, message)


def _wrong(override: Override, config: DictConfig, composer: Composer) -> Problem | None:
    """Return why an override cannot be applied to the configuration of a run."""
    key = override.key_or_group
    if override.is_sweep_override():
        return Problem(key, override.get_value_string(), "must be one value: this is one run")
    if override.is_hydra_override() or key == "recipe":
        value = NOTHING if override.is_delete() else override.value()
        return Problem(key, value, "goes with a run, and this one has been trained already")
    return diagnose.wrong(override, OmegaConf.to_container(config), composer.loader)


def _apply(override: Override, config: DictConfig, composer: Composer) -> Problem | None:
    """Apply an override; return why that fails."""
    key = override.key_or_group
    try:
        if diagnose.chooses(override, composer.loader):
            section = composer.compose([plain_word(override)])[key]
            with open_dict(config):
                config[key] = section
        else:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        return Problem(key, NOTHING, reason(error))
    return None
