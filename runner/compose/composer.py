"""Composing words with Hydra, and checking what they give."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from runner.compose import diagnose
from runner.compose import overrides as words
from runner.compose.resolve import resolved
from runner.config.check import examine
from runner.config.folders import CONFIG_NAME, find
from runner.config.nearest import nearest_name
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.schema import RunConfig
from runner.config.tensor_plan import settled

VERSION_BASE = "1.3"
JOB_NAME = "runner"


@dataclass(frozen=True)
class Source:
    """Where the configuration is read: ``--config-path``, ``--config-name``, ``--config-dir``."""

    path: Path | None = None
    name: str = CONFIG_NAME
    extra: Path | None = None


@contextmanager
def session(source: Source) -> Iterator[ConfigLoader]:
    """Hydra as the project is composed with, for as long as the block runs.

    Raises:
        RequestError: the file that ``source`` names does not exist.
    """
    GlobalHydra.instance().clear()
    store = ConfigStore.instance()
    # Hydra copies all that its sources hold for each composition, and only ever reads this one,
    # which is the same for all of them: that was half of the time of a check.
    vars(store)["__deepcopy__"] = lambda memo: store
    folder = source.path or find("conf")
    with initialize_config_dir(str(folder.absolute()), JOB_NAME, version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        if source.extra is not None:
            _add_source(loader, source.extra)
        _require_index(source, loader)
        try:
            yield loader
        finally:
            HydraConfig.instance().cfg = None


def _add_source(loader: Any, folder: Path) -> None:
    """Read ``folder`` too, with the precedence that Hydra gives to ``--config-dir``."""
    search_path = loader.get_search_path()
    search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(search_path)


def _require_index(source: Source, loader: Any) -> None:
    """Raise a RequestError if the file that ``--config-name`` names does not exist."""
    if loader.repository.config_exists(source.name):
        return
    files = [file for file in loader.get_group_options("", ObjectType.CONFIG) if file[0] != "_"]
    name = source.name.removesuffix(".yaml")
    near = nearest_name(name, files)
    hint = f"; did you mean {near}?" if near else ""
    where = source.path or find("conf")
    message = f"there is no {name}.yaml in {where}{hint}  (files: {', '.join(files)})"
    raise RequestError([Problem("--config-name", source.name, message)])


class Composer:
    """Composes words and checks what they give."""

    def __init__(self, source: Source, loader: ConfigLoader, broken: dict[str, str]) -> None:
        self.source = source
        self.loader = loader
        self.broken = broken
        # A diagnosis asks for the same words again; a sweep of many jobs must not keep them all.
        self._attempted = lru_cache(maxsize=8)(self._attempt)

    def __call__(self, given: Sequence[str]) -> DictConfig:
        """What ``given`` gives, or what Hydra and OmegaConf raise where it does not compose."""
        return compose(self.source.name, list(given), return_hydra_config=True)

    def attempt(self, given: Sequence[str]) -> DictConfig | None:
        """What ``given`` gives, or None where it does not compose."""
        return self._attempted(tuple(given))

    def _attempt(self, given: tuple[str, ...]) -> DictConfig | None:
        try:
            return self(given)
        except Exception:  # Hydra and OmegaConf raise ValueError, AssertionError and more for words
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            return None

    def check(
        self, overrides: Sequence[Override], config: DictConfig | None, number: int | None = None
    ) -> tuple[RunConfig | None, dict[str, Any], list[Problem]]:
        """The job of ``overrides``, and all that is wrong with it."""
        found = diagnose.Diagnosis()
        if config is None or diagnose.misuses_group(overrides, self.loader):
            found = diagnose.examine(overrides, self.attempt, self, self.loader)
            config = self.attempt(found.good)
            if config is None:
                return None, {}, found.problems or [self._failure(found.good)]
        plain, unresolved = resolved(config, number)
        plain = settled(plain)
        typed, wrong = examine(plain, found.unsettled)
        known = {problem.key for problem in (*found.problems, *unresolved)}
        problems = found.problems + unresolved
        problems += [problem for problem in wrong if problem.key not in known]
        if error := self.broken.get(str(plain.get("recipe"))):
            problems.append(Problem("recipe", plain["recipe"], error))
        return typed, plain, problems

    def refuse(self, word: str) -> Problem | None:
        """The problem of a word that chooses an option which does not exist."""
        [override], _ = words.read([word], self.loader)
        return diagnose.wrong_choice(override, self.loader)

    def _failure(self, given: Sequence[str]) -> Problem:
        """Why ``given`` does not compose, where no word is to blame but a file is."""
        try:
            self(given)
        except Exception as error:  # as above
            return Problem("configuration", NOTHING, diagnose.reason(error))
        raise AssertionError("composed at the second attempt")
