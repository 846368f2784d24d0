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
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.compose.recipes import TARGETS, RecipeSource
from runner.compose.values import OPEN, drop_arguments, exists, no_option, reason, set_value
from runner.config.folders import CONFIG_NAME, find, outputs
from runner.config.problem import MISSING, NOTHING, Problem, RequestError

_ODD = re.compile("[\0\ud800-\udfff]")
"""What no file can hold: NUL, and bytes of an argument that are no UTF-8."""


@dataclass(frozen=True)
class Source:
    """Where the configuration is read: ``--config-path``, ``--config-name``, ``--config-dir``."""

    path: Path | None = None
    name: str = CONFIG_NAME
    extra: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the main file."""
        return (self.path or find("conf")).absolute()

    @property
    def recipes(self) -> list[Path]:
        """The folders of recipes; later ones come first."""
        homes = (home / "recipe" for home in (self.path, self.extra) if home)
        return [find("recipes"), *(home for home in homes if home.is_dir())]


class _SearchPath(SearchPathPlugin):  # type: ignore[misc, unused-ignore]
    """Puts recipes, and the folder of ``--config-dir``, before the files of the main folder."""

    source = Source()

    def manipulate_search_path(self, search_path: Any) -> None:
        """Change Hydra's search path, as it begins."""
        if self.source.extra is not None:
            search_path.prepend("command-line", f"file://{self.source.extra}")
        recipes = os.pathsep.join(map(str, self.source.recipes))
        search_path.prepend("recipes", f"recipes://{recipes}")


def register() -> None:
    """Register resolvers and plugins of this project with Hydra."""
    # Kept within one composition, so that a run has one name; fresh for the next.
    OmegaConf.register_new_resolver(
        "runner.id", lambda: secrets.token_hex(3), use_cache=True, replace=True
    )
    OmegaConf.register_new_resolver("runner.outputs", lambda: str(outputs()), replace=True)
    OmegaConf.register_new_resolver(
        "runner.first",
        lambda *values: next((value for value in values if value is not None), None),
        replace=True,
    )
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


class Composer:
    """Hydra for one source of configuration files."""

    def __init__(self, source: Source | None = None) -> None:
        self.source = source or Source()
        self.options = lru_cache(maxsize=256)(self._options)
        self._base = lru_cache(maxsize=16)(
            lambda *words: compose(self.source.name, list(words), return_hydra_config=True)
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this Hydra the global one, which resolvers ask, as long as the block runs."""
        register()
        GlobalHydra.instance().clear()
        _SearchPath.source = self.source
        try:
            with initialize_config_dir(
                str(self.source.folder), job_name="runner", version_base="1.3"
            ):
                yield
        finally:
            _SearchPath.source = Source()
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None

    @property
    def loader(self) -> ConfigLoader:
        """Hydra's loader of files."""
        return GlobalHydra.instance().config_loader()

    def _options(self, group: str) -> list[str]:
        """Return the options of a group; empty if there is no such group."""
        try:
            return self.loader.get_group_options(group, ObjectType.CONFIG) if group else []
        except (OSError, HydraException):  # such as a key that is too long for the name of a file
            return []

    def read(self, words: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """Parse overrides."""
        parser = OverridesParser.create(config_loader=self.loader)
        overrides: list[Override] = []
        problems = []
        for word in words:
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

    def chooses(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group."""
        group = not isinstance(override.value(), dict) and self.options(override.key_or_group)
        return bool(group)

    def compose(self, overrides: Sequence[Override], onto: DictConfig | None = None) -> Composed:
        """Compose the overrides of one job, or change the configuration ``onto`` by them."""
        by_hydra = [one for one in overrides if self.chooses(one) or one.is_hydra_override()]
        values = [one for one in overrides if one not in by_hydra]
        words = [one.input_line or "" for one in by_hydra]
        made = self._choose(words)
        if replaced := self._replaced(made.config, values, onto):
            made = self._choose([*words, *replaced])
        if onto is None:
            task = [one.input_line or "" for one in overrides if not one.is_hydra_override()]
            made.config.hydra.overrides.task = task
            made.config.hydra.job.override_dirname = ",".join(sorted(task))
        else:
            with open_dict(onto):
                groups = [one.key_or_group for one in by_hydra]
                groups += [word.partition("=")[0] for word in replaced if onto is not None]
                onto.update({group: made.config[group] for group in groups})
            made.config = onto
        own = {word.partition("=")[0] for word in replaced}
        for one in values:
            section, _, last = one.key_or_group.partition(".")
            if last == "_target_" and section in own & {*TARGETS}:  # not those of a recipe either
                made.words += drop_arguments(section, made.config)
        targets = [one.key_or_group for one in values if one.key_or_group.endswith("._target_")]
        free = (*(f"{one}." for one in own), *(one.removesuffix("_target_") for one in targets))
        for one in values:
            section = one.key_or_group.partition(".")[0]
            if section in made.unsettled & {*OPEN}:
                continue  # its key depends on an option that does not exist
            if one.is_delete() and section in own and not exists(made.config, one.key_or_group):
                continue  # it was an argument of the option
            try:
                made.words.append(set_value(one, made.config, one.key_or_group.startswith(free)))
            except RequestError as error:
                made.problems += error.problems
        return made

    def _replaced(
        self, config: DictConfig, values: Sequence[Override], onto: DictConfig | None
    ) -> list[str]:
        """Choose an option without arguments for each section whose option has another target."""
        given = {one.key_or_group: one.value() for one in values if not one.is_delete()}
        words = []
        for section, option in {**dict.fromkeys(TARGETS, "custom"), "clip": "norm"}.items():
            node: Any = (config if onto is None else onto).get(section)
            plain: Any = OmegaConf.to_container(node) if node else {}
            before = plain.get("_target_")
            target = given.get(f"{section}._target_", before)
            if onto is None:
                before = self._target(f"{section}/{config.hydra.runtime.choices.get(section)}")
            if target not in (None, MISSING, before):
                words.append(f"{section}={option}")
        return words

    def _target(self, path: str) -> Any:
        """Return the target in the file of an option."""
        for source in self.loader.get_sources():
            if source.is_config(path):
                return OmegaConf.select(source.load_config(path).config, "_target_")
        return None

    def _choose(self, words: Sequence[str]) -> Composed:
        """Let Hydra compose ``words``; report those that do not compose with the ones before."""
        # Overrides make Hydra raise ValueError, AssertionError and more.
        with suppress(Exception):
            return Composed(copy.deepcopy(self._base(*words)), [*words])
        try:
            made = Composed(self._base())
        except Exception as error:
            raise RequestError(
                [Problem("--config-name", self.source.name, reason(error))]
            ) from None
        for word in words:
            try:
                made.config = self._base(*made.words, word)
                made.words.append(word)
            except Exception as error:
                key, equals, value = word.partition("=")
                options, text = self.options(key.lstrip("+~")), reason(error)
                if options and re.fullmatch(r"[\w.-]+", value) and value not in options:
                    text = no_option(key.lstrip("+~"), value, options)
                made.problems.append(Problem(key, value if equals else NOTHING, text))
                made.unsettled.add(key.lstrip("+~"))
        made.config = copy.deepcopy(made.config)
        return made
