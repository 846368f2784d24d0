"""Compose overrides with Hydra, resolve the result, and check it."""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.compose import diagnose, recipes, resolvers
from runner.compose import overrides as words
from runner.config.check import examine
from runner.config.folders import CONFIG_NAME, find, obstacle, outputs
from runner.config.problem import NOTHING, Problem, RequestError, nearest_name
from runner.config.schema import RunConfig
from runner.config.tensor_plan import settled

Earlier: TypeAlias = Callable[[Path, str | None], str | None]
"""Returns why a folder must not be written by a run (None), or by a sweep with the given hash."""

_PLUGINS = Path(__file__).resolve().parents[1] / "sweep" / "plugins"
"""Holds this project's part of ``hydra_plugins``, where Hydra looks for sweepers."""


@dataclass(frozen=True)
class Source:
    """Where the configuration is read: ``--config-path``, ``--config-name``, ``--config-dir``."""

    path: Path | None = None
    name: str = CONFIG_NAME
    extra: Path | None = None


class _Repository(ConfigRepository):
    """Configuration sources that all compositions share.

    For each composition Hydra deep-copies its sources with everything in its ConfigStore, which
    takes as long as the rest of a check. A composition can only replace the list of sources
    (``hydra.searchpath``), so that list alone is copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Repository:
        return copy.copy(self)


def register(given: Sequence[str] | None = None) -> dict[str, str]:
    """Register this project's resolvers, sweeper and recipes with Hydra.

    Args:
        given: overrides, if nothing but these chooses recipes: others are not read. None: all are.

    Returns:
        The error of each recipe that cannot be read, by the recipe's name.
    """
    resolvers.register()
    if str(_PLUGINS) not in sys.path:
        sys.path.append(str(_PLUGINS))
    # Hydra discovers plugins once a process, possibly before the line above.
    Plugins.instance().register(import_module("hydra_plugins.clip_runner").RecordSweeper)
    return recipes.register(recipes.read_all() if given is None else recipes.read(given))


class Composer:
    """Hydra for one source of configuration files.

    Args:
        source: where the configuration is read.
        given: overrides, if nothing else will be composed.

    Raises:
        RequestError: the file that ``source`` names does not exist.
    """

    def __init__(self, source: Source, given: Sequence[str] | None = None) -> None:
        self.source = source
        self._broken_recipes = register(given if source == Source() else None)
        version.setbase("1.3")
        folder = source.path or find("conf")
        search_path = create_config_search_path(str(folder.absolute()))
        if source.extra is not None:
            # The precedence that Hydra gives to --config-dir.
            schema = SearchPathQuery(provider="schema")
            search_path.prepend("command-line", f"file://{source.extra}", schema)
        self.loader = ConfigLoaderImpl(search_path)
        self.loader.repository = _Repository(search_path)
        self.hydra = Hydra("runner", self.loader)
        self._require_index(folder)
        # A diagnosis asks for the same overrides again; a sweep of many jobs must not keep them.
        self._attempted = lru_cache(maxsize=8)(self._attempt)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this Hydra the global one, which resolvers ask, as long as the block runs."""
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(self.hydra)
        try:
            yield
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None

    def compose(self, given: Sequence[str]) -> DictConfig:
        """Compose ``given``; raises what Hydra and OmegaConf raise for overrides that are wrong."""
        return self.hydra.compose_config(
            self.source.name, list(given), RunMode.RUN, from_shell=False
        )

    def attempt(self, given: Sequence[str]) -> DictConfig | None:
        """Compose ``given``; None where that fails."""
        return self._attempted(tuple(given))

    def _attempt(self, given: tuple[str, ...]) -> DictConfig | None:
        try:
            return self.compose(given)
        except Exception:  # overrides make Hydra raise ValueError, AssertionError and more
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            return None

    def check(
        self, overrides: Sequence[Override], config: DictConfig | None, number: int | None = None
    ) -> tuple[RunConfig | None, dict[str, Any], list[Problem]]:
        """Check the job of ``overrides``.

        Args:
            overrides: overrides of one job.
            config: their composition; None where they do not compose.
            number: number of the job in its sweep; None for a run.

        Returns:
            The typed configuration (None if anything is wrong), the same as plain containers, and
            everything that is wrong.
        """
        found = diagnose.Diagnosis()
        if config is None or diagnose.misuses_group(overrides, self.loader):
            found = diagnose.examine(overrides, self.attempt, self.compose, self.loader)
            config = self.attempt(found.good)
            if config is None:
                return None, {}, found.problems or [self._failure(found.good)]
        plain, unresolved = _resolved(config, number)
        typed, wrong = examine(plain, found.unsettled)
        known = {problem.key for problem in (*found.problems, *unresolved)}
        problems = found.problems + unresolved
        problems += [problem for problem in wrong if problem.key not in known]
        if error := self._broken_recipes.get(str(plain.get("recipe"))):
            problems.append(Problem("recipe", plain["recipe"], error))
        return typed, plain, problems

    def refuse(self, word: str) -> Problem | None:
        """Return the problem of an override that chooses an option which does not exist."""
        [override], _ = words.read([word], self.loader)
        return diagnose.wrong_choice(override, self.loader)

    def _failure(self, given: Sequence[str]) -> Problem:
        """Say why ``given`` does not compose, where the fault is in a file."""
        try:
            self.compose(given)
        except Exception as error:  # as above
            return Problem("configuration", NOTHING, diagnose.reason(error))
        raise AssertionError("composed at the second attempt")

    def _require_index(self, folder: Path) -> None:
        """Raise a RequestError if the file that ``--config-name`` names does not exist."""
        if self.loader.repository.config_exists(self.source.name):
            return
        listed = self.loader.get_group_options("", ObjectType.CONFIG)
        files = [file for file in listed if file[0] != "_"]
        name = self.source.name.removesuffix(".yaml")
        near = nearest_name(name, files)
        hint = f"; did you mean {near}?" if near else ""
        message = f"there is no {name}.yaml in {folder}{hint}  (files: {', '.join(files)})"
        raise RequestError([Problem("--config-name", self.source.name, message)])


def destination(
    config: DictConfig,
    kind: str,
    overrides: Sequence[Override] | None = None,
    earlier: Earlier | None = None,
) -> tuple[Path | None, list[Problem]]:
    """Resolve the folder that a run or a sweep will be written to; nothing is created.

    Args:
        config: the composition, Hydra's part included.
        kind: ``run`` or ``sweep``.
        overrides: overrides of the request, to check that the folder can be written; None leaves
            that out.
        earlier: returns why a run must not be written to a folder; None for any folder.

    Returns:
        The folder, None if it cannot be resolved, and why it cannot be written.
    """
    HydraConfig.instance().set_config(config)
    key = f"hydra.{kind}.dir"
    try:
        folder = Path(str(OmegaConf.select(config, key, throw_on_missing=True))).absolute()
    except (OmegaConfBaseException, ValueError) as error:
        return None, [Problem(key, NOTHING, f"cannot be resolved: {diagnose.reason(error)}")]
    if overrides is None:
        return folder, []
    if message := obstacle(folder):
        typed = any(override.key_or_group == key for override in overrides)
        if typed or not folder.is_relative_to(outputs()):
            return folder, [Problem(key, str(folder), message)]
        return folder, [Problem("RUNNER_OUTPUTS", str(outputs()), message)]
    if earlier is not None and (message := earlier(folder, None)):
        return folder, [Problem(key, str(folder), message)]
    return folder, []


def plain_config(config: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Return a job's configuration as plain containers, with the tensor plan read from its file."""
    content = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(content, dict)
    return settled({str(key): value for key, value in content.items()})


def _resolved(config: DictConfig, number: int | None) -> tuple[dict[str, Any], list[Problem]]:
    """Resolve the job's part of a composition.

    Returns:
        The configuration as plain containers, and what cannot be resolved in it.
    """
    folder = None if number is not None else destination(config, "run")[0]
    with read_write(config), open_dict(config), read_write(config.hydra):
        if number is not None:  # as the launcher of a sweep does
            config.hydra.job.num, config.hydra.job.id = number, number
        config.hydra.runtime.output_dir = str(folder or outputs())
    HydraConfig.instance().set_config(config)
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    try:
        return plain_config(job), []
    except OmegaConfBaseException:
        return plain_config(job, resolve=False), list(_unresolved(job, ""))


def _unresolved(node: Any, path: str) -> Iterator[Problem]:
    """Yield each value below ``node`` that refers to something which does not exist."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    items = raw.items() if isinstance(raw, dict) else enumerate(raw or ())
    for key, value in items:
        where = f"{path}.{key}" if path else str(key)
        try:
            content = node[key]
        except (OmegaConfBaseException, HydraException, ValueError, TypeError) as error:
            if not OmegaConf.is_missing(node, key):
                yield Problem(where, value, f"cannot be resolved: {diagnose.reason(error)}")
            continue
        if OmegaConf.is_config(content):
            yield from _unresolved(content, where)
