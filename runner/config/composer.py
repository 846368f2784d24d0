"""Compose overrides with Hydra, and name each override that cannot be one.

Options of groups are composed by Hydra. Values are then set one by one, as Hydra sets
``++key=value``: that cannot fail on a key that does not exist, so that one check of the typed
configuration names all wrong keys at once.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config.folders import CONFIG_NAME, find, outputs
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean, leaves, unknown_key
from runner.config.recipes import TARGETS, RecipeSource
from runner.config.schema import SHORT, owned_keys

OPEN = (*TARGETS, "loss")
"""Sections that pass any key to their target."""

_NUMBERS = {"clip": "clip.threshold", "accumulation": "accumulation.steps"}
"""The key that a number in place of an option of a group means."""

_ODD = re.compile("[\0\ud800-\udfff]")
"""What no file can hold: NUL, and bytes of an argument that are no UTF-8."""


class _SearchPath(SearchPathPlugin):  # type: ignore[misc, unused-ignore]
    """Puts recipes, and the folder of ``--config-dir``, before the files of ``conf/``."""

    extra: Path | None = None

    def manipulate_search_path(self, search_path: Any) -> None:
        if self.extra is not None:
            search_path.prepend("command-line", f"file://{self.extra}")
        homes = os.pathsep.join(map(str, recipe_folders(self.extra)))
        search_path.prepend("recipes", f"recipes://{homes}")


def recipe_folders(extra: Path | None) -> list[Path]:
    """Return the folders of recipes; later ones come first."""
    return [find("recipes"), *([extra / "recipe"] if extra else [])]


def register() -> None:
    """Register resolvers and plugins of this project with Hydra."""
    resolvers: dict[str, Any] = {
        "runner.id": lambda: secrets.token_hex(3),
        "runner.outputs": lambda: str(outputs()),
        "runner.first": lambda *values: next((one for one in values if one is not None), None),
    }
    for name, resolver in resolvers.items():
        # The id is kept within one composition, so that a run has one name.
        kept = name == "runner.id"
        OmegaConf.register_new_resolver(name, resolver, use_cache=kept, replace=True)
    for plugin in (RecipeSource, _SearchPath):
        Plugins.instance().register(plugin)
    # Hydra would add the options of other packages' launchers to our files of the same name.
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (find("conf") / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(file.name, None)


@dataclass
class Composed:
    """The composition of one job, as far as its overrides are right."""

    config: DictConfig
    words: list[str] = field(default_factory=list)  # what Hydra composes to the same
    problems: list[Problem] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)  # groups whose option does not exist


@lru_cache(maxsize=64)
def _composed(files: object, directory: str, *words: str) -> DictConfig:
    """Compose choices of options; the configuration holds the working directory."""
    return compose(CONFIG_NAME, [*words], return_hydra_config=True)


class Composer:
    """Hydra for the files of ``conf/`` and of a user's own folder, ``--config-dir``."""

    def __init__(self, extra: Path | None = None) -> None:
        self.extra = extra
        self._files = object() if extra else None  # those of conf/ stay as they are
        self.options = lru_cache(maxsize=256)(self._options)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this Hydra the global one, which resolvers ask, as long as the block runs."""
        register()
        GlobalHydra.instance().clear()
        _SearchPath.extra = self.extra
        try:
            with initialize_config_dir(str(find("conf")), job_name="runner", version_base="1.3"):
                yield
        finally:
            _SearchPath.extra = None
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None

    @property
    def loader(self) -> ConfigLoader:
        return GlobalHydra.instance().config_loader()

    def _options(self, group: str) -> list[str]:
        try:
            return self.loader.get_group_options(group, ObjectType.CONFIG) if group else []
        except (OSError, HydraException):  # such as a key that is too long for the name of a file
            return []

    def read(self, words: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """Parse overrides."""
        parser = OverridesParser.create(config_loader=self.loader)
        overrides: list[Override] = []
        problems = []
        for word in spelled_out(words):
            key, equals, value = word.partition("=")
            try:
                if odd := _ODD.search(word):
                    raise ValueError(f"it holds {odd[0]!a}, which is no character of a text")
                overrides += parser.parse_overrides([word])
            except Exception as error:  # HydraException, RecursionError, ValueError of a number
                text = (
                    f"cannot be read: {str(error).partition(chr(10))[0]}; text with spaces or "
                    f"signs goes in quotes within quotes, as in '{key}=\"a (b)\"'"
                    if equals
                    else "must be KEY=VALUE or GROUP=OPTION"
                )
                problems.append(Problem(key, value if equals else NOTHING, text))
        return overrides, problems

    def _chooses(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, or is for Hydra."""
        named = not isinstance(override.value(), dict) and self.options(override.key_or_group)
        return bool(named) or override.is_hydra_override()

    def compose(self, overrides: Sequence[Override], onto: DictConfig | None = None) -> Composed:
        """Compose the overrides of one job, or change the configuration ``onto`` by them."""
        chosen = [one for one in overrides if self._chooses(one)]
        values = [one for one in overrides if one not in chosen]
        made = self._choose(self._custom([one.input_line or "" for one in chosen]))
        if onto is None:
            task = [one.input_line or "" for one in overrides if not one.is_hydra_override()]
            made.config.hydra.overrides.task = task
            made.config.hydra.job.override_dirname = ",".join(sorted(task))
        else:
            for key, one in ((one.key_or_group, one) for one in chosen):
                if key in made.unsettled:
                    continue  # a problem of its own
                if one.is_delete() or key not in made.config:
                    text, word = "must be an option of a section of this run", one.get_key_element()
                    made.problems.append(Problem(word, one.value() or NOTHING, text))
                else:
                    onto[key] = made.config[key]
            made.config = onto
        targets = [one for one in values if one.key_or_group.endswith("._target_")]
        # Another target takes the place of the option's, and its arguments.
        dropped = {section for one in targets if (section := _drop_arguments(one, made))}
        free = [one.key_or_group.removesuffix("_target_") for one in targets]
        if onto is None:
            choices = made.config.hydra.runtime.choices
            free += [f"{one}." for one in TARGETS if choices.get(one) == "custom"]
        for one in values:
            section = one.key_or_group.partition(".")[0]
            if section in made.unsettled & {*OPEN}:
                continue  # its key depends on an option that does not exist
            if one.is_delete() and section in dropped and not exists(made.config, one.key_or_group):
                continue
            try:
                _set(one, made, one.key_or_group.startswith(tuple(free)))
            except RequestError as error:
                made.problems += error.problems
        return made

    def _base(self, *words: str) -> DictConfig:
        return _composed(self._files, os.getcwd(), *words)

    def _custom(self, words: Sequence[str]) -> list[str]:
        """Choose ``custom`` where a file of ``+group=option`` gives a section another target."""
        plain = [word for word in words if not word.startswith("+")]
        chosen = [*words]
        with suppress(Exception):  # which is reported when they are composed
            if plain != chosen:
                before, after = self._base(*plain), self._base(*words)
                for one in TARGETS:
                    target = (after.get(one) or {}).get("_target_")
                    if target is not None and target != (before.get(one) or {}).get("_target_"):
                        kept = [word for word in chosen if word.partition("=")[0] != one]
                        chosen = [*kept, f"{one}=custom"]
        return chosen

    def _choose(self, words: Sequence[str]) -> Composed:
        """Let Hydra compose ``words``; report those that do not compose with the ones before."""
        # Overrides make Hydra raise ValueError, AssertionError and more.
        with suppress(Exception):
            return Composed(copy.deepcopy(self._base(*words)), [*words])
        try:
            made = Composed(self._base())
        except Exception as error:
            problem = Problem("--config-dir", str(self.extra), reason(error))
            raise RequestError([problem]) from None
        for word in words:
            try:
                made.config = self._base(*made.words, word)
                made.words.append(word)
            except Exception as error:
                key, equals, value = word.partition("=")
                group, text = key.lstrip("+~"), reason(error)
                options = self.options(group)
                if options and re.fullmatch(r"[\w.-]+", value) and value not in options:
                    text = _no_option(group, value, options)
                made.problems.append(Problem(key, value if equals else NOTHING, text))
                made.unsettled.add(group)
        made.config = copy.deepcopy(made.config)
        return made


def spelled_out(given: Iterable[str]) -> list[str]:
    """Return overrides with ``resume.from=`` for ``resume=``, ``model._target_=`` for a class."""
    short = re.compile(rf"^(\+*)({'|'.join(SHORT)})=(?!{{)")
    target = re.compile(rf"^({'|'.join(OPEN)})=((?:\w+\.)+[^\W\d]\w*(?:,(?:\w+\.)+[^\W\d]\w*)*)$")
    words = (target.sub(r"\1._target_=\2", word) for word in given)
    return [short.sub(lambda found: f"{found[1]}{SHORT[found[2]]}=", word) for word in words]


def _set(one: Override, made: Composed, takes_any: bool) -> None:
    """Set or remove a value, and note the override with which Hydra does the same.

    A section of ``OPEN`` takes a key that its option lacks with a plus, or if it ``takes_any``.
    """
    key, config = one.get_key_element().lstrip("+~"), made.config
    value = NOTHING if one.is_delete() else one.value()
    there = exists(config, key)
    unknown: list[tuple[str, Any]] = []
    if one.is_delete():
        unknown = [] if there else [(key, NOTHING)]
    elif key.partition(".")[0] in OPEN and not (one.is_add() or one.is_force_add() or takes_any):
        unknown = [leaf for leaf in leaves(key, value) if not exists(config, leaf[0])]
    if unknown:
        raise RequestError(_unknown(leaf, content, config) for leaf, content in unknown)
    try:
        if one.is_delete():
            parent, _, last = key.rpartition(".")
            with open_dict(config):
                del (OmegaConf.select(config, parent) if parent else config)[last]
            made.words.append(f"~{key}")
            return
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except Exception as error:  # OmegaConf raises TypeError, IndexError and more for odd keys
        raise RequestError([Problem(key, value, reason(error))]) from None
    sign = "" if there and not isinstance(value, dict) else "+" if one.is_add() else "++"
    made.words.append(f"{sign}{key}={one.get_value_string()}")


def _drop_arguments(target: Override, made: Composed) -> str | None:
    """Remove the arguments of a section that has another target; return the section's name."""
    section, _, last = target.key_or_group.partition(".")
    node = made.config.get(section) if section in (*OPEN, "clip") else None
    if last != "_target_" or not isinstance(node, DictConfig) or target.is_delete():
        return None
    if target.value() in (None, OmegaConf.to_container(node).get("_target_")):  # type: ignore[union-attr]
        return None
    gone = [key for key in map(str, node) if f"{section}.{key}" not in owned_keys()]
    with open_dict(node):
        for key in gone:
            del node[key]
    made.words += (f"~{section}.{key}" for key in gone)
    return section


def exists(config: DictConfig, key: str) -> bool:
    """Return whether a dotted key exists, also where it has no value yet."""
    section, dot, _ = key.partition(".")
    if not dot or section not in config:
        return section in [*config]
    node = config[section]
    inside = leaves(section, OmegaConf.to_container(node) if OmegaConf.is_config(node) else None)
    return any(name == key or name.startswith(f"{key}.") for name, _ in inside)


def _unknown(key: str, value: Any, config: DictConfig) -> Problem:
    plain: Any = OmegaConf.to_container(config)
    section = key.partition(".")[0]
    known = {*owned_keys(plain), *(name for name, _ in leaves(section, plain.get(section)))}
    problem = unknown_key(key, known, value)
    further = section in OPEN and "." in key
    advice = f"; a further argument of its _target_ is +{key}=VALUE" if further else ""
    return Problem(key, value, problem.message + advice)


def _no_option(group: str, option: str, options: Sequence[str]) -> str:
    near, listed = did_you_mean(option, options), ", ".join(options)
    if group in _NUMBERS and re.fullmatch(r"[\d.e-]+", option):
        near = f"; did you mean {_NUMBERS[group]}={option}?"
    if group in OPEN:
        listed += f"; any class or function by its full name: {group}=package.name"
    return f"there is no {group}/{option}{near}  (options: {listed})"


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return _no_option(group, option, error.options)
    lines = f"{error}\n{error.__cause__ or ''}".splitlines()
    noise = ("To append", "full_key", "object_type")
    kept = [line.strip() for line in lines if not line.strip().startswith(noise)]
    return " ".join(filter(None, kept)) or type(error).__name__
