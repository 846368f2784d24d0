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
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Sweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

from runner.compose.recipes import RecipeSource
from runner.compose.values import OPEN, apply, dropped_arguments, plain_word, reason
from runner.config.folders import CONFIG_NAME, find, outputs
from runner.config.problem import (
    NOTHING,
    Problem,
    RequestError,
    did_you_mean,
    or_list,
)

_PLUGINS = Path(__file__).resolve().parents[1] / "sweep" / "plugins"
"""Holds this project's part of ``hydra_plugins``, where Hydra looks for sweepers."""

_LONGEST = 20_000
"""Characters of the longest override. Hydra reads some ten thousand a second."""

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


class _SearchPath(SearchPathPlugin):  # type: ignore[misc, unused-ignore]
    """Puts recipes, and the folder of ``--config-dir``, before the files of the main folder."""

    source = Source()

    def manipulate_search_path(self, search_path: Any) -> None:
        """Change Hydra's search path, as it begins."""
        homes = [home / "recipe" for home in (self.source.path, self.source.extra) if home]
        recipes = [str(home) for home in (find("recipes"), *homes) if home.is_dir()]
        if self.source.extra is not None:
            search_path.prepend("command-line", f"file://{self.source.extra}")
        search_path.prepend("recipes", f"recipes://{os.pathsep.join(recipes)}")


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
    if str(_PLUGINS) not in sys.path:
        sys.path.append(str(_PLUGINS))
    # Hydra discovers plugins once a process, possibly before the line above.
    ours = import_module("hydra_plugins.clip_runner")
    kinds = (Sweeper, Launcher)
    found = (one for one in vars(ours).values() if isinstance(one, type) and issubclass(one, kinds))
    own = (one for one in found if one.__module__ == ours.__name__ and not isabstract(one))
    for plugin in (RecipeSource, _SearchPath, *own):
        Plugins.instance().register(plugin)
    # Hydra would add the options of other packages' launchers to our files of the same name.
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (find("conf") / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(file.name, None)


@dataclass
class Composed:
    """The composition of one job, as far as its overrides are right."""

    config: DictConfig | None
    problems: list[Problem] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """The overrides in a form that Hydra composes to the same."""

    unsettled: set[str] = field(default_factory=set)
    """Groups whose option does not exist."""


class Composer:
    """Hydra for one source of configuration files."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._base = lru_cache(maxsize=16)(self._compose)
        self._listed = lru_cache(maxsize=256)(self._options)
        self._paths: tuple[str, ...] = ()

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

    def read(self, words: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """Parse overrides."""
        parser = OverridesParser.create(config_loader=self.loader)
        overrides, problems, words = [], [], list(words)
        paths = tuple(word for word in words if word.startswith("hydra.searchpath="))
        self._paths = paths or self._paths
        for word in words:
            try:
                overrides += _parsed(word, parser)
            except RecursionError:
                problems.append(self._unreadable(word, "it is nested too deep"))
            except Exception as error:  # beside HydraException the ValueError of a number, and more
                problems.append(self._unreadable(word, str(error)))
        return overrides, problems

    def options(self, group: str) -> list[str]:
        """Return the options of a group; empty if there is no such group."""
        return self._listed(group, self._paths) if group else []

    def _options(self, group: str, paths: tuple[str, ...]) -> list[str]:
        name = self.source.name if paths else None
        try:
            return self.loader.get_group_options(group, ObjectType.CONFIG, name, list(paths))
        except (OSError, HydraException):  # such as a key that is too long for the name of a file
            return []

    def chooses(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group."""
        key = override.key_or_group
        return not isinstance(override.value(), dict) and bool(self.options(key))

    def _is_further(self, override: Override) -> bool:
        """Return whether an override adds a group that has no default, as ``+experiment=mine``."""
        base = self._attempt(()) if override.is_add() else None
        return base is not None and override.key_or_group not in base.hydra.runtime.choices

    def compose(self, overrides: Sequence[Override]) -> Composed:
        """Compose the overrides of one job."""
        made, texts = Composed(None), {}
        first, values = [], []
        for number, one in enumerate(overrides):
            chooses = self.chooses(one)
            if chooses and (problem := self._wrong_choice(one)):
                made.problems.append(problem)
                made.unsettled.add(one.key_or_group)
            elif chooses or one.is_hydra_override():
                sign = None if not chooses or self._is_further(one) else ""
                texts[number] = plain_word(one, sign)
                first.append(texts[number])
            else:
                values.append((number, one))
        made.config = self._attempt(first)
        if made.config is None:
            kept = self._settle(first, made)
            texts = {number: text for number, text in texts.items() if text in kept}
        if made.config is None:
            return made
        given = [one for _, one in values]
        dropped = dropped_arguments(given, made.config)
        for number, one in values:
            section = one.key_or_group.partition(".")[0]
            if section in made.unsettled and section in OPEN:
                continue  # its keys depend on an option that does not exist
            text, problems = apply(one, made.config, given, dropped)
            made.problems += problems
            if text is not None:
                texts[number] = text
        task = [one.input_line or "" for one in overrides if not one.is_hydra_override()]
        made.config.hydra.overrides.task = task
        made.config.hydra.job.override_dirname = ",".join(sorted(task))
        made.words = [*dropped, *(texts[number] for number in sorted(texts))]
        return made

    def _attempt(self, words: Sequence[str]) -> DictConfig | None:
        try:
            return copy.deepcopy(self._base(tuple(words)))
        except Exception:  # overrides make Hydra raise ValueError, AssertionError and more
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            return None

    def _compose(self, words: tuple[str, ...]) -> DictConfig:
        return compose(self.source.name, list(words), return_hydra_config=True)

    def _settle(self, words: Sequence[str], made: Composed) -> list[str]:
        """Keep the words that compose with those before them, and report the others."""
        kept: list[str] = []
        for word in [None, *words]:
            try:
                made.config = copy.deepcopy(self._base((*kept, *([word] if word else []))))
            except Exception as error:
                key, _, value = (word or "configuration").partition("=")
                group = key.lstrip("+~")
                text = reason(error)
                if group.startswith("hydra.") and "Key" in text:
                    text += "; --cfg hydra prints the keys that Hydra has"
                made.problems.append(Problem(key, value if word else NOTHING, text))
                made.unsettled.add(group)
                if word is None:
                    self._require_main_file()
                    return []
            else:
                kept += [word] if word else []
        return kept

    def _require_main_file(self) -> None:
        listed = self.loader.get_group_options("", ObjectType.CONFIG)
        name = self.source.name.removesuffix(".yaml")
        if name not in listed:
            files = [file for file in listed if file[0] != "_"]
            hint = f"{did_you_mean(name, files)}  (files: {', '.join(files)})"
            message = f"there is no {name}.yaml in {self.source.folder}{hint}"
            raise RequestError([Problem("--config-name", self.source.name, message)])

    def _wrong_choice(self, override: Override) -> Problem | None:
        """Return the problem of a choice of an option; None if it is right."""
        group, value = override.key_or_group, override.value()
        options = self.options(group)
        allowed = f"(options of {group}: {', '.join(options)})"
        if override.is_delete():
            return Problem(f"~{group}", NOTHING, f"a run needs this choice  {allowed}")
        if override.package is not None:
            return Problem(override.get_key_element(), value, f"must be {group}=OPTION  {allowed}")
        if isinstance(value, str) and value in options:
            return None
        if (group, value) == ("hydra/sweeper", "optuna"):
            return Problem(group, value, f"needs pip install 'clip-runner[optuna]'  {allowed}")
        return Problem(group, value, f"unknown option{did_you_mean(value, options)}  {allowed}")

    def _unreadable(self, word: str, error: str) -> Problem:
        key, equals, value = word.partition("=")
        if not equals:
            groups = (one for one in self.loader.list_groups("") if one != "hydra")
            homes = [f"{group}={word}" for group in groups if word in self.options(group)]
            near = f"; did you mean {or_list(homes)}?" if homes else ""
            return Problem(word, NOTHING, f"must be KEY=VALUE or GROUP=OPTION{near}")
        text = (
            f"cannot be read: {error.partition(chr(10))[0]}; text with spaces or signs goes in "
            f"quotes within quotes, as in '{key}=\"a (b)\"'"
        )
        return Problem(key, value, text)


def _parsed(word: str, parser: OverridesParser) -> list[Override]:
    if len(word) > _LONGEST:
        raise HydraException(f"it has {len(word):,} characters, and at most {_LONGEST:,} are read")
    if odd := _ODD.search(word):
        raise HydraException(f"it holds {odd[0]!a}, which is no character of a text")
    if word.startswith("="):
        raise HydraException("there is no key")
    parsed: list[Override] = parser.parse_overrides([word])
    for override in parsed:
        value = override.value()
        listed = value.list if isinstance(value, ChoiceSweep) else value
        if any(isinstance(part, Sweep | Glob) for part in _parts(listed)):
            raise HydraException("choices, ranges and intervals cannot stand inside a list")
    return parsed


def _parts(value: Any) -> Iterator[Any]:
    """Yield everything inside the lists and dicts of ``value``."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inside:
        yield part
        yield from _parts(part)
