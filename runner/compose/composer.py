"""Read and compose overrides with Hydra, and find the folder that the result is written to."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.compose import recipes, resolvers
from runner.compose.loader import Loader
from runner.compose.parsing import parse
from runner.config.clip_section import Clip
from runner.config.folders import CONFIG_NAME, find, obstacle, outputs
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean
from runner.config.tensor_plan import settled

Earlier: TypeAlias = Callable[[Path, str | None, Sequence[str]], str | None]
"""Returns why a folder must not be written by a run (None), or by a sweep with the given hash."""

_PLUGINS = Path(__file__).resolve().parents[1] / "sweep" / "plugins"
"""Holds this project's part of ``hydra_plugins``, where Hydra looks for sweepers."""


@dataclass(frozen=True)
class Source:
    """Where the configuration is read: ``--config-path``, ``--config-name``, ``--config-dir``."""

    path: Path | None = None
    name: str = CONFIG_NAME
    extra: Path | None = None


def register() -> None:
    """Register this project's resolvers and sweeper with Hydra."""
    resolvers.register()
    if str(_PLUGINS) not in sys.path:
        sys.path.append(str(_PLUGINS))
    # Hydra discovers plugins once a process, possibly before the line above.
    ours = import_module("hydra_plugins.clip_runner")
    Plugins.instance().register(ours.RecordSweeper)
    # Hydra would add the options of other packages' launchers to our files of the same name.
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (find("conf") / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(file.name, None)


class Composer:
    """Hydra for one source of configuration files."""

    def __init__(self, source: Source, given: Sequence[str] | None = None) -> None:
        self.source = source
        register()
        version.setbase("1.3")
        folder = source.path or find("conf")
        search_path = create_config_search_path(str(folder.absolute()))
        if source.extra is not None:
            # The precedence that Hydra gives to --config-dir.
            schema = SearchPathQuery(provider="schema")
            search_path.prepend("command-line", f"file://{source.extra}", schema)
        # Files of a user may choose recipes too.
        chosen = recipes.read(given) if source == Source() and given is not None else None
        self.broken_recipes = recipes.register(
            recipes.read_all(recipes.folders(search_path)) if chosen is None else chosen
        )
        self.loader = Loader(search_path)
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

    def read(self, words: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """Parse overrides."""
        return parse(words, self.loader)

    def compose(self, given: Sequence[str]) -> DictConfig:
        """Compose ``given``."""
        return self.hydra.compose_config(
            self.source.name, list(given), RunMode.RUN, from_shell=False
        )

    def composed(self, overrides: Iterable[Override]) -> DictConfig | None:
        """Compose the overrides that list no values; None where that fails."""
        return self.attempt([plain_word(one) for one in overrides if not one.is_sweep_override()])

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

    def _require_index(self, folder: Path) -> None:
        """Raise a RequestError if the file that ``--config-name`` names does not exist."""
        if self.loader.repository.config_exists(self.source.name):
            return
        listed = self.loader.get_group_options("", ObjectType.CONFIG)
        files = [file for file in listed if file[0] != "_"]
        name = self.source.name.removesuffix(".yaml")
        hint = did_you_mean(name, files)
        message = f"there is no {name}.yaml in {folder}{hint}  (files: {', '.join(files)})"
        raise RequestError([Problem("--config-name", self.source.name, message)])


def with_own_mode(given: Sequence[str]) -> list[str]:
    """Let ``clip._target_=package.Mode`` and the mode's options be given without ``+``."""
    keys = [word.lstrip("+").partition("=")[0] for word in given]
    if "clip._target_" not in keys:
        return list(given)
    return [
        f"++{word.lstrip('+')}"
        if key.startswith("clip.") and key.split(".")[1] not in Clip.model_fields
        else word
        for key, word in zip(keys, given, strict=True)
    ]


def plain_word(override: Override) -> str:
    """Return the text of an override that lists no values."""
    if override.is_delete() and override.value() is None:
        return override.get_key_element()
    return f"{override.get_key_element()}={override.get_value_string()}"


def destination(
    config: DictConfig,
    kind: str,
    overrides: Sequence[Override] | None = None,
    earlier: Earlier | None = None,
) -> tuple[Path | None, list[Problem]]:
    """Resolve the folder that a run or a sweep will be written to; nothing is created."""
    HydraConfig.instance().set_config(config)
    key = f"hydra.{kind}.dir"
    try:
        folder = Path(str(OmegaConf.select(config, key, throw_on_missing=True))).absolute()
    except (OmegaConfBaseException, ValueError) as error:
        return None, [Problem(key, NOTHING, f"cannot be resolved: {reason(error)}")]
    if overrides is None:
        return folder, []
    if message := obstacle(folder):
        typed = any(override.key_or_group == key for override in overrides)
        if typed or not folder.is_relative_to(outputs()):
            return folder, [Problem(key, str(folder), message)]
        return folder, [Problem("RUNNER_OUTPUTS", str(outputs()), message)]
    if earlier is not None and (message := earlier(folder, None, ())):
        return folder, [Problem(key, str(folder), message)]
    return folder, []


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


def plain_config(config: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Return a job's configuration as plain containers, with the tensor plan read from its file."""
    content = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(content, dict)
    return settled({str(key): value for key, value in content.items()})
