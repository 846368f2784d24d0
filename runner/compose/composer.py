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
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.compose.recipes import RecipeSource
from runner.config.check import owned_keys
from runner.config.clip_section import modes_with
from runner.config.folders import CONFIG_NAME, find, outputs
from runner.config.problem import (
    NOTHING,
    Problem,
    RequestError,
    did_you_mean,
    leaves,
    or_list,
    unknown_key,
)

OPEN = ("model", "data", "optimizer", "scheduler", "loss")
"""Sections that pass any key to their target."""

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
                sign = "" if chooses else one.get_key_element().removesuffix(one.key_or_group)
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
        dropped = _dropped(given, made.config)
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


def plain_word(override: Override, sign: str | None = None) -> str:
    """Return the text of an override that lists no values, with another sign before its key."""
    key = override.get_key_element() if sign is None else f"{sign}{override.key_or_group}"
    if override.is_delete() and override.value() is None:
        return str(key)
    return f"{key}={override.get_value_string()}"


def _target_given(key: str, values: Iterable[Override]) -> bool:
    """Return whether overrides name another target for a section around ``key``."""
    return any(
        one.key_or_group.endswith("._target_")
        and key.startswith(one.key_or_group.removesuffix("_target_"))
        for one in values
    )


def _dropped(values: Iterable[Override], config: DictConfig) -> list[str]:
    """Remove the arguments of the options whose target is replaced; return that as overrides."""
    words = []
    for one in values:
        section, _, last = one.key_or_group.partition(".")
        node: Any = config.get(section) if section in (*OPEN, "clip") else None
        if last != "_target_" or node is None or node.get("_target_") == one.value():
            continue
        owned = owned_keys({"clip": {"_target_": one.value()}})
        for key in [str(key) for key in node if f"{section}.{key}" not in owned]:
            with open_dict(node):
                del node[key]
            words.append(f"~{section}.{key}")
    return words


def apply(
    one: Override, config: DictConfig, others: Sequence[Override] = (), gone: Sequence[str] = ()
) -> tuple[str | None, list[Problem]]:
    """Set or remove a value in ``config``; return the override for Hydra, and what is wrong."""
    key, value = one.key_or_group, one.value()
    try:
        if one.is_delete():
            if not has(config, key):
                known = f"~{key}" in gone
                return None, [] if known else [_unknown(key, NOTHING, config)]
            parent, _, last = key.rpartition(".")
            node: Any = OmegaConf.select(config, parent) if parent else config
            with open_dict(node):
                del node[last]
            return f"~{key}", []
        exists = has(config, key)
        # Only a section whose target was named, or a plus, takes keys that its option lacks.
        closed = key.partition(".")[0] in OPEN and not (one.is_add() or one.is_force_add())
        unknown = [
            _unknown(leaf, content, config)
            for leaf, content in (leaves(key, value) if closed else ())
            if not has(config, leaf) and not _target_given(leaf, others)
        ]
        if unknown:
            return None, unknown
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except Exception as error:  # OmegaConf raises TypeError, IndexError and more for odd keys
        return None, [Problem(key, NOTHING if one.is_delete() else value, reason(error))]
    sign = "" if exists and not isinstance(value, dict) else "++"
    if not exists and one.is_add():
        sign = "+"
    return plain_word(one, sign), []


def has(config: DictConfig, key: str) -> bool:
    """Return whether a dotted key exists, also where it has no value yet."""
    node: Any = config
    for part in key.replace("[", ".").replace("]", "").split("."):
        if OmegaConf.is_list(node) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif OmegaConf.is_dict(node) and part in [*node]:
            node = None if OmegaConf.is_missing(node, part) else node[part]
        else:
            return False
    return True


def _unknown(key: str, value: Any, config: DictConfig) -> Problem:
    """Return the problem of a key of ours, or of a target, that does not exist."""
    plain: Any = OmegaConf.to_container(config)
    known = {*owned_keys(plain)}
    section, _, rest = key.partition(".")
    if section in OPEN:
        known |= {leaf for leaf, _ in leaves(section, plain.get(section, {}))}
    problem = unknown_key(key, known, value)
    if section in OPEN and rest and value is not NOTHING:
        advice = f"; a further argument of its _target_ is +{key}=VALUE"
        return Problem(key, value, problem.message + advice)
    if section == "clip" and (modes := modes_with(rest.partition(".")[0])):
        return Problem(key, value, f"is an option of {or_list(f'clip={mode}' for mode in modes)}")
    return problem


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        near, options = did_you_mean(option, error.options), ", ".join(error.options)
        return f"chooses {group}/{option}, which does not exist{near}  (options: {options})"
    texts = [str(error), str(error.__cause__ or "")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    kept = [
        line
        for line in lines
        if line
        and "append to your" not in line
        and not line.startswith(("full_key", "object_type"))
    ]
    return " ".join(kept[:3]) or type(error).__name__


def unresolved(node: Any, path: str = "") -> Iterator[Problem]:
    """Yield each value below ``node`` that refers to something which does not exist."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    items = raw.items() if isinstance(raw, dict) else enumerate(raw or ())
    for key, value in items:
        where = f"{path}.{key}" if path else str(key)
        try:
            content = node[key]
        except (OmegaConfBaseException, HydraException, ValueError, TypeError) as error:
            if not OmegaConf.is_missing(node, key):
                yield Problem(where, value, f"cannot be resolved: {reason(error)}")
            continue
        if OmegaConf.is_config(content):
            yield from unresolved(content, where)


def with_own_mode(given: Sequence[str]) -> list[str]:
    """Return ``given``: options of a user's mode need no ``+``."""
    return list(given)
