"""The configuration as it is recorded: without secrets, and without values of the environment.

Training uses the resolved configuration. Files, pages and wandb get the form that is made here: a
value that comes from the environment is recorded as its reference (``${oc.env:DATA}``), and the
value of a key that looks like a secret is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from runner.compose.composer import plain_config
from runner.config.identity import ENVIRONMENT, NOT_HASHED, digest
from runner.config.secrets import (
    MASK,
    hidden,
    is_secret,
    learn_environment,
    learn_secrets,
    masked,
    masked_words,
)


def resolved_and_recorded(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job's configuration in plain containers: resolved, and as it is recorded."""
    with _watched() as read:
        plain = plain_config(config)
    has_secrets = learn_secrets(plain)
    learn_environment(read)
    if not read and not has_secrets:
        return plain, plain
    # References to a secret key resolve to its mask.
    without = OmegaConf.create(masked(OmegaConf.to_container(config, resolve=False)))
    digests: dict[str, str] = {}
    recorded = _recorded(without, plain, (), digests)
    return plain, recorded | ({ENVIRONMENT: digests} if digests else {})


def recorded_words(words: Any) -> list[str]:
    """Return ``hydra.overrides.task`` as it is recorded: references as typed, secrets masked."""
    typed: Any = OmegaConf.to_container(words, resolve=False)
    return masked_words(typed)


def write_composition(home: Path) -> None:
    """Write the files of the run that Hydra has just begun to ``home``, but without secrets."""
    composed: Any = HydraConfig.instance().cfg
    content = unresolved(composed)
    hydra = content.pop("hydra")
    home.mkdir(exist_ok=True)
    parts = {"config": content, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    for name, part in parts.items():
        (home / f"{name}.yaml").write_text(as_yaml(part), encoding="utf-8")


def unresolved(config: DictConfig) -> dict[str, Any]:
    """Return a composition in plain containers, references unresolved, without secrets."""
    content: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    job, overrides = content["hydra"]["job"], content["hydra"]["overrides"]
    for name in job["env_copy"]:  # Hydra has copied the values into env_set
        job["env_set"][name] = f"${{oc.env:{name}}}"
    for part, words in overrides.items():
        overrides[part] = masked_words(words)
    if job.get("override_dirname"):
        job["override_dirname"] = ",".join(overrides["task"])
    whole: dict[str, Any] = hidden(masked(content))
    return whole


def as_yaml(content: Any) -> str:
    """Return plain containers as YAML, keys in their order."""
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


@contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """Collect the environment variables that are read while references are resolved."""
    read: dict[str, Any] = {}

    def env(name: str, *default: Any) -> Any:
        read[name] = oc.env(name, *default)
        return read[name]

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield read
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _recorded(
    node: DictConfig | ListConfig, plain: Any, path: tuple[str, ...], digests: dict[str, str]
) -> Any:
    """Return a container as it is recorded."""
    written: Any = OmegaConf.to_container(node, resolve=False)
    pairs = written.items() if isinstance(written, dict) else enumerate(written)
    entries = {
        key: _entry(node, key, text, plain[key], (*path, str(key)), digests) for key, text in pairs
    }
    return entries if isinstance(written, dict) else list(entries.values())


def _entry(
    node: DictConfig | ListConfig,
    key: Any,
    written: Any,
    plain: Any,
    path: tuple[str, ...],
    digests: dict[str, str],
) -> Any:
    """Return one entry of a container as it is recorded; ``written`` is its unresolved value."""
    if isinstance(written, dict | list):
        return _recorded(node[key], plain, path, digests)
    if written == MASK or not OmegaConf.is_interpolation(node, key):
        return MASK if written == MASK else plain
    secret = any(map(is_secret, path))
    try:
        with _watched() as read:
            value = node[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
    except Exception:  # a resolver does not take the mask of a secret
        return written
    if read and path[0] not in NOT_HASHED and not (secret or any(map(is_secret, read))):
        digests[".".join(path)] = digest(plain)
    if read or secret:
        return written
    return value if MASK in str(value) else hidden(plain)
