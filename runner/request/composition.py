"""What Hydra composes of overrides, and what its errors say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import KeyValidationError

from runner.config.problem import Problem, near_name
from runner.config.trust import Origin
from runner.request.overrides import OPEN

_NUMBERS = {"clip": "clip.threshold", "accumulation": "accumulation.steps"}
"""Groups for which a number may be typed, and the key that it is meant for."""

_SWEEPER = "hydra/sweeper"


@dataclass
class Composition:
    """The composition of one job, as far as its overrides are right."""

    config: DictConfig
    choices: list[str] = field(default_factory=list)  # of options; Hydra composed these
    problems: list[Problem] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)  # groups whose option does not exist
    origin: Origin | None = None  # what was typed over a record; None: there is no record

    @property
    def has_sweeper(self) -> bool:
        """Whether Hydra has composed the sweeper that was chosen."""
        return _SWEEPER not in self.unsettled


def refer_to(config: DictConfig) -> None:
    """Let ``${hydra:...}`` refer to a configuration itself: Hydra would copy it for each job."""
    HydraConfig.instance().cfg = config  # type: ignore[assignment]


def no_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return the message for an option that does not exist, with the nearest right name."""
    if (group, option) == (_SWEEPER, "optuna"):  # an option of a plugin of Hydra
        return 'is not installed: pip install "clip-runner[optuna]"'
    near = near_option(group, option, options)
    meant = f"; did you mean {near}?" if near else ""
    listed = ", ".join(options)
    if group in OPEN:
        listed += f"; any class or function by its full name: {group}=package.name"
    if group == "tracker":
        listed += f"; a sink of your own: {group}._target_=package.Sink"
    return f"there is no {group}/{option}{meant}  (options: {listed})"


def near_option(group: str, option: str, options: Sequence[str]) -> str:
    """Return what was probably meant by an option that does not exist; empty if nothing is near."""
    if group in _NUMBERS and re.fullmatch(r"[\d.e-]+", option):
        return f"{_NUMBERS[group]}={option}"
    return near_name(option, options)


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return no_option(group, option, error.options)
    if isinstance(error, KeyValidationError) and "NoneType" in str(error):
        return "a key of a mapping must be text, a number, true or false, not null"
    lines = f"{error}\n{error.__cause__ or ''}".splitlines()
    noise = ("To append", "full_key", "object_type")
    kept = [line.strip() for line in lines if not line.strip().startswith(noise)]
    return " ".join(filter(None, kept)) or type(error).__name__
