"""A composition in the files of a run: written without secrets, and read again as a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from runner.config.masking import masked, masked_words, remembered
from runner.config.problem import Problem
from runner.request.base import configuration
from runner.request.composer import Composer
from runner.request.jobs import Job, job_of
from runner.request.overrides import Override, read_typed


def write_composition(folder: Path, config: DictConfig) -> None:
    """Write the files of the run that Hydra has just begun to ``folder``, but without secrets."""
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    content = unresolved(HydraConfig.instance().cfg, plain)
    hydra = content.pop("hydra")
    folder.mkdir(exist_ok=True)
    write_yaml(folder / "config.yaml", content)
    write_yaml(folder / "hydra.yaml", {"hydra": hydra})
    write_yaml(folder / "overrides.yaml", hydra["overrides"]["task"])


def unresolved(config: Any, plain: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a composition in plain containers, references unresolved, without secrets.

    ``plain``: the rest of it, where ``config`` has Hydra's part alone.
    """
    content: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    content = {**(plain or {}), **content}
    job = content["hydra"]["job"]
    overrides = content["hydra"]["overrides"]
    # Hydra has copied the values of these into env_set.
    job["env_set"] |= {name: f"${{oc.env:{name}}}" for name in job["env_copy"]}
    overrides |= {part: masked_words(texts) for part, texts in overrides.items()}
    job["override_dirname"] = ",".join(overrides["task"])
    return dict(masked(content, known=remembered()))


def write_yaml(file: Path, content: Any) -> None:
    """Write plain containers to a YAML file, keys in their order."""
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def recorded_job(file: Path, overrides: Sequence[str], config_dir: Path | None = None) -> Job:
    """Return the job that the configuration file of a run describes, with overrides."""
    content = configuration(file, "RUN", str(file.parent))
    content.pop("trust", None)  # the user trusts a folder, not the folder itself
    composer = Composer(config_dir)
    with composer.active():
        parsed, problems = read_typed(overrides)
        fixed = [override for override in parsed if _is_fixed(override)]
        message = "must be one value of this run's configuration: the run is trained already"
        for override in fixed:
            problems.append(Problem(override.group, override.value_text, message))
        free = [override for override in parsed if not _is_fixed(override)]
        composition = composer.compose(free, content)
        composition.problems += problems
        return job_of(composition, file.parent)


def _is_fixed(override: Override) -> bool:
    """Return whether an override cannot be given for a run that is trained already."""
    return override.lists or override.is_for_hydra or override.group == "recipe"
