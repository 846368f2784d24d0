"""Compose overrides: Hydra chooses options of groups, and the values are set one after another.

Between options and overrides lie the values of a recipe, and of ``+experiment=mine``. Another
``_target_`` for a section takes the place of its option: the arguments that the section had are
removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import secrets
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import ChoiceSweep, Glob
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config.folders import Refusal, find, outputs, read_yaml
from runner.config.masking import masked_words
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.trust import Origin
from runner.request.assignment import Assignment, add_defaults_of_the_mode, assign
from runner.request.base import base_of, source_of, unrecorded_secrets
from runner.request.composition import Composition, near_option, no_option, reason, refer_to
from runner.request.overrides import Override, read_overrides
from runner.request.recipes import Recipe, files_of, read
from runner.workarounds import forget_launchers_of_packages

SUBDIR = "hydra.sweep.subdir="
"""The start of an override by which a run of a sweep has its number from the sweep."""


class _SearchPath(SearchPathPlugin):  # type: ignore[misc, unused-ignore]
    """Puts the folder of ``--config-dir`` before the files of ``conf/``."""

    config_dir: Path | None = None

    def manipulate_search_path(self, search_path: Any) -> None:
        """Add the folder; Hydra calls this."""
        if self.config_dir is not None:
            search_path.prepend("command-line", f"file://{self.config_dir}")


def _register() -> None:
    """Register our resolvers and the search path at OmegaConf and Hydra."""
    new = OmegaConf.register_new_resolver
    # The id is kept within one composition, so that a run has one name.
    new("runner.id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    new("runner.outputs", lambda: str(outputs()), replace=True)
    Plugins.instance().register(_SearchPath)
    files = (find("conf") / "hydra" / "launcher").glob("*.yaml")
    forget_launchers_of_packages(file.name for file in files)


@lru_cache(maxsize=256)
def _pickled(files: object, directory: str, *choices: str) -> bytes:
    """Compose options in this directory; pickled, as ``copy.deepcopy`` takes five times as long."""
    return pickle.dumps(compose("config", list(choices), return_hydra_config=True))


class Composer:
    """Hydra for the files of ``conf/`` and of a user's own folder, ``--config-dir``.

    Launchers get it as their loader of configurations, so that each job of a sweep is composed, in
    whatever process, as it was when it was checked.
    """

    def __init__(self, config_dir: Path | None = None) -> None:
        self.config_dir = config_dir
        self.recipes = files_of(config_dir)
        self._files = object() if config_dir else None  # our own files do not change
        self._read: dict[Path, Recipe] = {}
        self._compositions: dict[tuple[str, ...], bytes] = {}  # by choices; launchers get them too
        self._planned: dict[Path, str] | None = None  # digests of the files of a sweep
        self._bases: dict[str, dict[str, Any]] = {}  # recorded configurations, by ``resume``
        self._names: set[str] | None = None  # targets in the folder of options
        self._options: dict[str, list[str]] = {"": [], "recipe": ["none", *self.recipes]}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this Hydra the global one, which resolvers ask, as long as the block runs.

        Then log files that Hydra has opened are closed, and the caller's logging is restored.
        """
        _register()
        GlobalHydra.instance().clear()
        _SearchPath.config_dir = self.config_dir
        root = logging.getLogger()
        handlers = list(root.handlers)
        level = root.level
        try:
            with initialize_config_dir(str(find("conf")), job_name="runner", version_base="1.3"):
                yield
        finally:
            _SearchPath.config_dir = None
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None
            for handler in {*root.handlers} - {*handlers}:
                handler.close()
            root.handlers[:] = handlers
            root.setLevel(level)

    def options(self, group: str) -> list[str]:
        """Return the options of a group; none if there is no such group."""
        if group not in self._options:
            self._options[group] = []
            loader = GlobalHydra.instance().config_loader()
            with suppress(OSError, HydraException):  # such as a name that is too long for a file
                self._options[group] = loader.get_group_options(group, ObjectType.CONFIG)
        return self._options[group]

    def chooses(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, or is for Hydra."""
        if override.is_for_hydra:
            return True
        is_option = not isinstance(override.value, dict)
        return is_option and bool(self.options(override.group))

    def compose(
        self, overrides: Sequence[Override], base: Mapping[str, Any] | None = None
    ) -> Composition:
        """Compose the overrides of one job, over the configuration ``base`` of a run.

        The run that ``resume`` names is the base of what continues it.
        """
        if base is not None:
            return self._over(base, overrides)
        composition = self._compose(overrides, {})
        source = source_of(composition.config)
        if source is None:
            return composition
        try:
            if source not in self._bases:
                self._bases[source] = base_of(source)
        except RequestError as error:
            composition.problems += error.problems
            return composition
        base = self._bases[source]
        return self._over(base, overrides) if base else composition

    def _over(self, base: Mapping[str, Any], overrides: Sequence[Override]) -> Composition:
        """Compose overrides over the configuration of a run, and note what of it was typed."""
        composition = self._compose(overrides, base)
        composition.problems += unrecorded_secrets(composition.config)
        composition.origin = Origin(names=self._names_of_folder())
        for override in overrides:
            whole = self.chooses(override)
            composition.origin.add(override.key, override.value, whole=whole)
        return composition

    def _names_of_folder(self) -> set[str]:
        """Return the targets that the user's own folder of options names."""
        if self._names is None:
            origin = Origin()
            if self.config_dir is not None:
                origin.add_folder(self.config_dir)
            self._names = origin.names
        return {*self._names}

    def _compose(self, overrides: Sequence[Override], base: Mapping[str, Any]) -> Composition:
        chosen: dict[str, Override] = {}  # by group
        values: list[Override] = []
        for override in overrides:
            if self.chooses(override):
                chosen[override.key] = override
            else:
                values.append(override)
        layers, choices, problems = self._layers(chosen)
        composition = self._choose(choices)
        composition.problems += problems
        config = composition.config
        texts = [override.text for override in overrides if not override.is_for_hydra]
        config.hydra.overrides.task = texts
        # A folder may be named after it.
        config.hydra.job.override_dirname = ",".join(sorted(masked_words(texts)))
        if base:
            _set_base(config, base, {*chosen, *_groups_of(layers)})
        assignments = list(_of_layers(layers, chosen))
        # A recipe may have set keys of Hydra: those that are typed are set once more.
        typed = [chosen[key] for key in chosen if layers and key.startswith("hydra.")]
        # Arguments are set after the target that they are for.
        values.sort(key=lambda override: not override.key.endswith("._target_"))
        for override in (*typed, *values):
            if override.key not in composition.unsettled:
                value = NOTHING if override.removes else override.value
                assignments.append(Assignment(override.text, override.key, value, override.adds))
        assign(assignments, composition)
        add_defaults_of_the_mode(composition.config)
        refer_to(composition.config)
        return composition

    def _layers(
        self, chosen: Mapping[str, Override]
    ) -> tuple[dict[str, Recipe], dict[str, str], list[Problem]]:
        """Return the recipes and experiments, the choices for Hydra, and what cannot be read.

        Recipes stand by the override that chooses them. Each choice comes with its override.
        """
        layers: dict[str, Recipe] = {}
        choices: dict[str, str] = {}
        problems: list[Problem] = []
        for group, override in chosen.items():
            try:
                layer = self._layer(group, override)
            except Refusal as error:
                name = str(override.value)
                options = self.options(group)
                near = "" if name in options else near_option(group, name, options)
                problems.append(Problem(group, override.value, str(error), near))
                continue
            if layer is not None:
                layers[override.text] = layer
                for key, option in layer.choices.items():
                    if key not in chosen:
                        choices[f"{key}={option}"] = override.text
            elif group != "recipe":
                choices[override.text] = override.text
        return layers, choices, problems

    def _layer(self, group: str, override: Override) -> Recipe | None:
        """Return the recipe or the experiment that an override chooses."""
        name: Any = override.value
        if group == "recipe" and name not in ("none", None):
            if name not in self.options(group):
                raise Refusal(no_option(group, str(name), self.options(group)))
            recipe = self._recipe(self.recipes[name])
            recipe.content["recipe"] = name
            return recipe
        if self.config_dir and override.adds and name in self.options(group):
            file = self.config_dir / group / f"{name}.yaml"
            if file in self._read or file.is_file():
                recipe = self._recipe(file)
                return recipe if recipe.is_global else None
        return None

    def _recipe(self, file: Path) -> Recipe:
        if file not in self._read:
            self._read[file] = read(file)
        return self._read[file]

    def _choose(self, choices: Mapping[str, str]) -> Composition:
        """Let Hydra compose choices; report those that do not compose with the ones before."""
        # Hydra's own choices first, as launchers give them.
        ordered = sorted(choices, key=lambda choice: not choice.lstrip("+~").startswith("hydra"))
        self._require_unchanged(ordered)
        with suppress(Exception):  # overrides make Hydra raise ValueError, AssertionError and more
            return Composition(pickle.loads(self._composed(ordered)), ordered)
        try:
            composition = Composition(pickle.loads(self._composed([])))
        except Exception as error:
            problem = Problem(f"--config-dir={self.config_dir}", NOTHING, reason(error))
            raise RequestError([problem]) from None
        for choice, override in choices.items():
            accepted = [*composition.choices, choice]
            try:
                composition.config = pickle.loads(self._composed(accepted))
                composition.choices = accepted
            except Exception as error:
                group, _, option = choice.partition("=")
                options = self.options(group)
                message = reason(error)
                near = ""
                if options and re.fullmatch(r"[\w.-]+", option) and option not in options:
                    message = no_option(group, option, options)
                    near = near_option(group, option, options)
                composition.problems.append(Problem(override, NOTHING, message, near))
                composition.unsettled.add(group.lstrip("+~"))
        return composition

    def _composed(self, choices: Sequence[str]) -> bytes:
        """Compose choices as they were composed when the request was checked."""
        key = tuple(choices)
        if key not in self._compositions:
            self._compositions[key] = _pickled(self._files, os.getcwd(), *choices)
        return self._compositions[key]

    def plan(self) -> None:
        """Note the content of all files: later jobs are composed of the same, or refused."""
        self._planned = self._digests()

    def _digests(self) -> dict[Path, str]:
        homes = [find("conf"), find("recipes")]
        if self.config_dir:
            homes.append(self.config_dir)
        files = (file for home in homes for file in sorted(home.rglob("*.yaml")) if file.is_file())
        return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def _require_unchanged(self, choices: Sequence[str]) -> None:
        """Refuse choices that a search composes for the first time of files that have changed."""
        if self._planned is None or tuple(choices) in self._compositions:
            return
        current = self._digests()
        for file, digest in self._planned.items():
            if current.get(file) != digest:
                message = f"{file} was changed while the sweep runs: repeat the command"
                raise RequestError([Problem(" ".join(choices), NOTHING, message)])

    def sweeps_in_lists(self, overrides: Iterable[Override]) -> Iterator[Problem]:
        """Yield the recipes and experiments in lists that would themselves be sweeps.

        What they say about Hydra counts for a whole command, and no run of a sweep is a sweep.
        """
        for override in overrides:
            group = override.key
            if not isinstance(override.value, ChoiceSweep | Glob) or not self.options(group):
                continue
            with suppress(Exception):  # such a list is reported where its runs are composed
                for value in list(override.parsed.sweep_string_iterator()):
                    [choice], _ = read_overrides([f"{override.signed_key}={value}"])
                    layer = self._layer(group, choice)
                    if layer is not None and "hydra" in layer.content:
                        message = f"{value} says for itself how a sweep runs: give it alone"
                        yield Problem(group, override.value_text, message)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Compose one job of a sweep; Hydra's launchers call this.

        They number the jobs of a launch without a gap; an override ``SUBDIR`` names a run's own
        folder.
        """
        _register()  # in another process Hydra has found the plugins anew
        shared: Any = OmegaConf.to_container(master_config.hydra.overrides.hydra)
        texts = [text for text in sweep_overrides if not text.startswith(SUBDIR)]
        overrides, problems = read_overrides([*shared, *texts])
        composition = self.compose(overrides)
        problems += composition.problems
        if problems:
            raise RequestError(problems)
        config = composition.config
        config.hydra.sweep.dir = master_config.hydra.sweep.dir
        config.hydra.output_subdir = master_config.hydra.output_subdir
        for text in sweep_overrides:
            if text.startswith(SUBDIR):
                config.hydra.sweep.subdir = text.removeprefix(SUBDIR)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config


def _set_base(config: DictConfig, base: Mapping[str, Any], chosen: Collection[str]) -> None:
    """Set the sections of a run, but those whose option is ``chosen``.

    Another clipping mode keeps what is the same beside every mode, such as ``clip.skip``.
    """
    with open_dict(config):
        config.update({key: value for key, value in base.items() if key not in chosen})
        clip = base.get("clip")
        if "clip" not in chosen or "clip" not in config or not isinstance(clip, Mapping):
            return
        if clip.get("mode") == config.clip.get("mode") and "_target_" not in clip:
            config.clip = clip
        else:
            shared = read_yaml(find("conf") / "clip_keys.yaml")
            config.clip.update({key: clip[key] for key in shared if key in clip})


def _groups_of(layers: Mapping[str, Recipe]) -> set[str]:
    """Return the groups whose option a recipe or an experiment chooses."""
    return {group for layer in layers.values() for group in layer.choices}


def _of_layers(
    layers: Mapping[str, Recipe], chosen: Mapping[str, Override]
) -> Iterator[Assignment]:
    """Yield the values of recipes and experiments that hold with what is chosen.

    Values for a section whose option or target a recipe names hold only with this one: the learning
    rate of a recipe for SGD is no learning rate for AdamW.
    """
    names = ChainMap({group: override.value for group, override in chosen.items()})
    names.maps += [layer.names for layer in reversed([*layers.values()])]
    for text, layer in layers.items():
        for section, content in layer.content.items():
            if section not in layer.names or layer.names[section] == names.get(section):
                yield Assignment(text, section, content, adds=True)
