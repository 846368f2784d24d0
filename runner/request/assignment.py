"""Set the values of overrides and recipes in a composition, one after another.

Values are set as Hydra sets ``++key=value``: that cannot fail on a key that does not exist. One
check of the typed configuration names all wrong keys at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.config.check import owned_keys
from runner.config.mode import COMMON
from runner.config.modes import MODES, NAMES, options_of
from runner.config.problem import NOTHING, Problem, leaves, unknown_key
from runner.request.composition import Composition, reason
from runner.request.overrides import OPEN


class Assignment(NamedTuple):
    """The value that an override or a recipe gives to a key."""

    source: str  # the text of the override, or of the override that chooses the recipe
    key: str
    value: Any  # NOTHING: the key is removed
    adds: bool  # whether the key may be new in a section of OPEN

    @property
    def section(self) -> str:
        """The section of the key."""
        return self.key.partition(".")[0]


def assign(assignments: Iterable[Assignment], composition: Composition) -> None:
    """Set values, remove the keys of those that are NOTHING, and note what is wrong with each.

    A section of ``OPEN`` takes a key that its option lacks only with a plus, or beside a target.
    """
    free: list[str] = []  # where keys may be added without a plus
    for assignment in assignments:
        if assignment.section in composition.unsettled.intersection(OPEN):
            continue  # its key depends on an option that does not exist
        if assignment.key == "hydra" and assignment.value is NOTHING:
            problem = Problem(assignment.source, NOTHING, "cannot be removed")
            composition.problems.append(problem)
            continue
        try:
            composition.problems += _set(assignment, composition.config, free)
        except Exception as error:  # OmegaConf raises TypeError, IndexError and more for odd keys
            composition.problems.append(Problem(assignment.source, NOTHING, reason(error)))


def _set(assignment: Assignment, config: DictConfig, free: list[str]) -> list[Problem]:
    """Set or remove one value, unless its key does not exist: return that as problems."""
    key = assignment.key
    sections = _plain(config, assignment.section)
    for leaf, target in leaves(key, assignment.value):
        if leaf.endswith("._target_"):
            free.append(leaf.removesuffix("_target_"))
            if leaf == f"{assignment.section}._target_":
                _drop_arguments(config, assignment.section, sections, target)
    if not assignment.adds and not key.startswith(tuple(free)):
        unknown = list(_unknown(assignment, sections, config))
        if unknown:
            return unknown
    with open_dict(config):
        if assignment.value is NOTHING:
            parent, _, last = key.rpartition(".")
            (OmegaConf.select(config, parent) or {}).pop(last, None)
        else:
            merges = key != "accumulation.steps"  # phases take the place of all others
            OmegaConf.update(config, key, assignment.value, merge=merges, force_add=True)
    return []


def _plain(config: DictConfig, section: str) -> dict[str, Any]:
    """Return one section of a configuration in plain containers, references unresolved."""
    items: Any = config.items_ex(resolve=False, keys=[section])
    return {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for name, value in items
    }


def _drop_arguments(
    config: DictConfig, section: str, sections: Mapping[str, Any], target: Any
) -> None:
    """Remove the arguments of a section that gets another target."""
    values = sections.get(section)
    if section not in (*OPEN, "clip") or not isinstance(values, dict):
        return
    if target in (None, NOTHING, values.get("_target_")):
        return
    owned = owned_keys()
    with open_dict(config):
        for name in values:
            key = f"{section}.{name}"  # or a section, such as data.collate
            if not any(f"{full_name}.".startswith(f"{key}.") for full_name in owned):
                del config[section][name]


def _unknown(
    assignment: Assignment, sections: Mapping[str, Any], config: DictConfig
) -> Iterator[Problem]:
    """Yield the keys that are to be removed, or set in a section of ``OPEN``, and do not exist."""
    is_open = assignment.section in OPEN
    if not is_open and assignment.value is not NOTHING:
        return  # the typed check names them
    existing = dict(leaves("", sections))
    if assignment.value is NOTHING:
        existing |= dict.fromkeys(owned_keys(sections))  # such as an option that has its default
    for leaf, value in leaves(assignment.key, assignment.value):
        if any(f"{name}.".startswith(f"{leaf}.") for name in existing):
            continue
        if any(f"{leaf}.".startswith(f"{name}.") for name in owned_keys(sections)):
            continue  # it has a default, or is inside of a value, as a pattern of optimizer.groups
        arguments = [key for name in OPEN for key, _ in leaves("", _plain(config, name))]
        problem = unknown_key(leaf, {*owned_keys(sections), *existing, *arguments}, value)
        if is_open and "." in leaf:
            advice = f"; a further argument of its _target_ is +{leaf}=VALUE"
            problem = replace(problem, message=problem.message + advice)
        yield problem


def add_defaults_of_the_mode(config: DictConfig) -> None:
    """Add the options of a clipping mode that no file and no override gives."""
    try:
        clip = config.get("clip")
        is_own = not isinstance(clip, DictConfig) or clip.get("_target_") is not None
        mode = None if is_own else clip.get("mode")
    except OmegaConfBaseException:  # the check of a job reports it
        return
    if mode not in NAMES:
        return
    with open_dict(clip):
        for name, declared in options_of(MODES[mode]).items():
            if name not in clip and name not in COMMON:
                clip[name] = declared.get_default(call_default_factory=True)
