"""Hydra's loader, which reads each file once and merges each choice of options once.

Hydra reads and merges all files again for each composition. A diagnosis of a wrong request composes
several times, and a sweep once for each job; most of these differ in values alone, which Hydra sets
after it has merged the files.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

from runner.config.yaml_file import read_text_and_config

MOST = 16
"""Choices of options whose composition is kept."""

_HEADER = 512
"""Characters in which Hydra looks for ``# @package``."""


class Loader(ConfigLoaderImpl):
    """Loads configurations from files, which do not change meanwhile."""

    def __init__(self, search_path: ConfigSearchPath) -> None:
        self.config_search_path = search_path
        self.repository = _Repository(search_path)
        self._merged: dict[Hashable, DictConfig] = {}
        self._options: dict[Hashable, list[str]] = {}

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """Merge the files of ``defaults``."""
        sources = tuple((one.scheme(), one.path) for one in repo.get_sources())
        key = (sources, *((one.config_path, one.package, one.primary) for one in defaults))
        if key not in self._merged:
            if len(self._merged) == MOST:
                self._merged.clear()
            self._merged[key] = super()._compose_config_from_defaults_list(defaults, _Copies(repo))
        return copy.deepcopy(self._merged[key])

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Return the options of a group."""
        key = (group_name, results_filter, config_name, tuple(overrides or ()))
        if key not in self._options:
            self._options[key] = super().get_group_options(*key[:3], list(key[3]))
        return list(self._options[key])


class _Repository(ConfigRepository):
    """Files that were read, which all compositions share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Repository:
        return copy.copy(self)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self._loaded: dict[str, ConfigResult | None] = {}

    def _find_object_source(
        self, config_path: str, object_type: ObjectType | None
    ) -> ConfigSource | None:
        """Find a recipe first where :mod:`runner.compose.recipes` has stored it, in parts."""
        if object_type == ObjectType.CONFIG and config_path.startswith("recipe/"):
            stored = self.get_schema_source()
            if stored.is_config(config_path):
                return stored
        return super()._find_object_source(config_path, object_type)

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._loaded:
            source = self._find_object_source(config_path, ObjectType.CONFIG)
            found = None
            if source is not None and source.scheme() == "file":
                found = self._read(source, config_path)
            self._loaded[config_path] = found or super().load_config(config_path)
        return self._loaded[config_path]

    def _read(self, source: ConfigSource, config_path: str) -> ConfigResult | None:
        """Read a file by libyaml; None if it holds neither keys nor a list."""
        file = Path(source.path, source._normalize_file_name(config_path))
        text, _, config = read_text_and_config(file)
        if config is None:
            return None
        header = source._get_header_dict(text[:_HEADER])
        result = ConfigResult(source.provider, f"file://{source.path}", config, header)
        defaults = self._extract_defaults_list(config_path, config)
        result.defaults_list = self._create_defaults_list(config_path, defaults)
        return result


class _Copies(CachingConfigRepository):
    """Hands out copies of configurations: merging changes them."""

    def __init__(self, repo: IConfigRepository) -> None:
        self.delegate = repo

    def load_config(self, config_path: str) -> ConfigResult | None:
        found = copy.copy(self.delegate.load_config(config_path))
        if found is not None:
            found.config = copy.deepcopy(found.config)
        return found
