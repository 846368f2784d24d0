"""Compose overrides: Hydra chooses options of groups, and the values are set one after another.

Values are set as Hydra sets ``++key=value``: that cannot fail on a key that does not exist, so that
one check of the typed configuration names all wrong keys at once. Between options and overrides lie
the values of a recipe, and of ``+experiment=mine``. Another ``_target_`` for a section takes the
place of its option: the arguments that the section had are removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import secrets
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import KeyValidationError

from runner.config.folders import Refusal, find, outputs
from runner.config.masking import masked_words, remember, secrets_in
from runner.config.modes import MODES, NAMES, options_of
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean, leaves, unknown_key
from runner.config.schema import SHORT, owned_keys
from runner.request.recipes import Recipe, files_of, read

OPEN = ("model", "data", "optimizer", "scheduler", "loss")  # they pass any key to their target

SUBDIR = "hydra.sweep.subdir="  # a word by which a run of a sweep has its number from the sweep

_NUMBERS = {"clip": "clip.threshold", "accumulation": "accumulation.steps"}  # what a number means

_UNREADABLE = (
    "cannot be read as KEY=VALUE or GROUP=OPTION; text with spaces or signs goes in quotes within "
    "quotes, as in 'tracker.name=\"a (b)\"'"
)


class _SearchPath(SearchPathPlugin):  # type: ignore[misc, unused-ignore]
    """Puts the folder of ``--config-dir`` before the files of ``conf/``."""

    extra: Path | None = None

    def manipulate_search_path(self, search_path: Any) -> None:
        if self.extra is not None:
            search_path.prepend("command-line", f"file://{self.extra}")


def _register() -> None:
    new = OmegaConf.register_new_resolver
    # The id is kept within one composition, so that a run has one name.
    new("runner.id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    new("runner.outputs", lambda: str(outputs()), replace=True)
    Plugins.instance().register(_SearchPath)
    # Hydra would add the options of other packages' launchers to our files of the same name.
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for file in (find("conf") / "hydra" / "launcher").glob("*.yaml"):
        launchers.pop(file.name, None)


@dataclass
class Composed:
    """The composition of one job, as far as its overrides are right."""

    config: DictConfig
    choices: list[str] = field(default_factory=list)  # of options; Hydra composed these
    problems: list[Problem] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)  # groups whose option does not exist


@lru_cache(maxsize=256)
def _composed(files: object, directory: str, *words: str) -> bytes:
    """Compose options in this directory; pickled, as ``copy.deepcopy`` takes five times as long."""
    return pickle.dumps(compose("config", [*words], return_hydra_config=True))


class Composer:
    """Hydra for the files of ``conf/`` and of a user's own folder, ``--config-dir``.

    Launchers get it as their loader of configurations, so that each job of a sweep is composed, in
    whatever process, as it was when it was checked.
    """

    def __init__(self, extra: Path | None = None) -> None:
        self.extra = extra
        self.recipes = files_of(extra)
        self._files = object() if extra else None  # those of conf/ stay as they are
        self._read = dict[Path, Recipe]()
        self._compositions = dict[tuple[str, ...], bytes]()  # of choices; launchers get them too
        self._planned: dict[Path, str] | None = None  # digests of the files of a sweep
        self._options = {"": [], "recipe": ["none", *self.recipes]}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this Hydra the global one, which resolvers ask, as long as the block runs.

        Then log files that Hydra has opened are closed, and the caller's logging is restored.
        """
        _register()
        GlobalHydra.instance().clear()
        _SearchPath.extra = self.extra
        root = logging.getLogger()
        handlers, level = [*root.handlers], root.level
        try:
            with initialize_config_dir(str(find("conf")), job_name="runner", version_base="1.3"):
                yield
        finally:
            _SearchPath.extra = None
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = None
            for handler in {*root.handlers} - {*handlers}:
                handler.close()
            root.handlers[:] = handlers
            root.setLevel(level)

    def options(self, group: str) -> list[str]:
        if group not in self._options:
            self._options[group] = []
            loader = GlobalHydra.instance().config_loader()
            with suppress(OSError, HydraException):  # such as a name that is too long for a file
                self._options[group] = loader.get_group_options(group, ObjectType.CONFIG)
        return self._options[group]

    def read(self, words: Iterable[str]) -> tuple[list[Override], list[Problem]]:
        """Parse overrides."""
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides, problems = list[Override](), list[Problem]()
        for word in spelled_out(words):
            try:
                if re.search("[\0\ud800-\udfff]", word):  # no file can hold these
                    raise ValueError
                OmegaConf.create([word])  # Hydra records it, which fails for ${.}
                [override] = parser.parse_overrides([word])
                remember(secrets_in(_listed(override), override.get_key_element()))
                overrides.append(override)
            except Exception:  # HydraException, RecursionError, ValueError of a number
                problems.append(Problem(word, NOTHING, _UNREADABLE))
        return overrides, problems

    def repeated(self, given: Sequence[str]) -> Iterator[Problem]:
        """Yield the keys that are given twice: the last value alone would count.

        ``~key +key=value`` gives a key once, and so do equal overrides.
        """
        earlier: dict[str, tuple[str, Override]] = {}
        for word in given:
            overrides, problems = self.read([word])
            if problems:
                continue
            [override] = overrides
            for key in sorted(_keys_of(word, override)):
                before = earlier.get(key)
                earlier[key] = (word, override)
                if before is None or before[0] == word:
                    continue
                if before[1].is_delete() and (override.is_add() or override.is_force_add()):
                    continue
                first, second = masked_words([before[0], word])
                text = f"is given twice ({first} and {second}): leave one of them out"
                yield Problem(key, NOTHING, text)
                break

    def plan(self) -> None:
        """Note the content of all files: later jobs are composed of the same, or refused."""
        self._planned = self._digests()

    def _digests(self) -> dict[Path, str]:
        homes = [find("conf"), find("recipes"), *([self.extra] if self.extra else [])]
        found = (file for home in homes for file in sorted(home.rglob("*.yaml")) if file.is_file())
        return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in found}

    def _composition(self, choices: Sequence[str]) -> bytes:
        """Compose choices as they were composed when the request was checked."""
        key = tuple(choices)
        if key not in self._compositions:
            composed = _composed(self._files, os.getcwd(), *choices)
            self._compositions[key] = composed
        return self._compositions[key]

    def _require_unchanged(self, choices: Sequence[str]) -> None:
        """Refuse choices that a search composes for the first time of files that have changed."""
        if self._planned is None or tuple(choices) in self._compositions:
            return
        now = self._digests()
        for file, digest in self._planned.items():
            if now.get(file) != digest:
                text = f"{file} was changed while the sweep runs: repeat the command"
                raise RequestError([Problem(" ".join(choices), NOTHING, text)])

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Compose one job of a sweep; Hydra's launchers call this.

        They number the jobs of a launch without a gap; a word ``SUBDIR`` names a run's own folder.
        """
        _register()  # in another process Hydra has found the plugins anew
        plain: Any = OmegaConf.to_container(master_config.hydra.overrides.hydra)
        words = [word for word in sweep_overrides if not word.startswith(SUBDIR)]
        overrides, problems = self.read([*plain, *words])
        made = self.compose(overrides)
        if problems := [*problems, *made.problems]:
            raise RequestError(problems)
        made.config.hydra.sweep.dir = master_config.hydra.sweep.dir
        made.config.hydra.output_subdir = master_config.hydra.output_subdir
        for word in sweep_overrides:
            if word.startswith(SUBDIR):
                made.config.hydra.sweep.subdir = word.removeprefix(SUBDIR)
        OmegaConf.copy_cache(from_config=master_config, to_config=made.config)
        return made.config

    def compose(
        self, overrides: Sequence[Override], base: Mapping[str, Any] | None = None
    ) -> Composed:
        """Compose the overrides of one job, or of a run that has the configuration ``base``."""
        typed = {one.get_key_element().lstrip("+~"): one for one in overrides if self.chooses(one)}
        layers, problems = dict[str, Recipe](), list[Problem]()
        words: dict[str, str] = {}  # what Hydra composes, and the override that it comes from
        for group, one in typed.items():
            word = one.input_line or ""
            try:
                if layer := self._layer(group, one):
                    layers[word] = layer
                    chosen = layer.choices.items()
                    words |= {f"{key}={name}": word for key, name in chosen if key not in typed}
                elif group != "recipe":
                    words[word] = word
            except Refusal as error:
                problems.append(Problem(group, one.value(), str(error)))
        made = self._choose(words)
        made.problems += problems
        task = [one.input_line or "" for one in overrides if not one.is_hydra_override()]
        made.config.hydra.overrides.task = task
        # A folder may be named after it.
        made.config.hydra.job.override_dirname = ",".join(sorted(masked_words(task)))
        with open_dict(made.config):
            made.config.update({key: one for key, one in (base or {}).items() if key not in typed})
        final = ChainMap({group: one.value() for group, one in typed.items()})
        final.maps += [layer.names for layer in reversed(layers.values())]
        # Values for a section whose option or target a layer names hold only with this one: the
        # learning rate of a recipe for SGD is no learning rate for AdamW.
        values = [
            (word, section, content, True)
            for word, layer in layers.items()
            for section, content in layer.content.items()
            if final.get(section) == layer.names.get(section, final.get(section))
        ]
        again = [one for key, one in typed.items() if layers and key.startswith("hydra.")]
        rest = [one for one in overrides if not self.chooses(one)]
        # Arguments are set after the target that they are for.
        rest.sort(key=lambda one: not one.key_or_group.endswith("._target_"))
        for one in (*again, *rest):
            key, adds = one.get_key_element().lstrip("+~"), one.is_add() or one.is_force_add()
            value = NOTHING if one.is_delete() else one.value()
            if key not in made.unsettled:
                values.append((one.input_line or "", key, value, adds))
        _set(values, made)
        _add_defaults_of_the_mode(made.config)
        return made

    def chooses(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, or is for Hydra."""
        named = not isinstance(override.value(), dict) and self.options(override.key_or_group)
        return bool(named) or override.is_hydra_override()

    def _layer(self, group: str, one: Override) -> Recipe | None:
        """Return the recipe or the experiment that an override chooses."""
        name: Any = one.value()
        if group == "recipe" and name not in ("none", None):
            if name not in self.options(group):
                raise Refusal(_no_option(group, str(name), self.options(group)))
            recipe = self._recipe(self.recipes[name])
            recipe.content["recipe"] = name
            return recipe
        if self.extra and one.is_add() and name in self.options(group):
            file = self.extra / group / f"{name}.yaml"
            if file in self._read or file.is_file():
                recipe = self._recipe(file)
                return recipe if recipe.is_global else None
        return None

    def _recipe(self, file: Path) -> Recipe:
        if file not in self._read:
            self._read[file] = read(file)
        return self._read[file]

    def sweeps_in_lists(self, listed: Iterable[Override]) -> Iterator[Problem]:
        """Yield the recipes and experiments in lists that would themselves be sweeps.

        What they say about Hydra counts for a whole command, and no run of a sweep is a sweep.
        """
        for override in listed:
            group = override.get_key_element().lstrip("+")
            if override.is_range_sweep() or override.is_interval_sweep() or not self.options(group):
                continue
            with suppress(Exception):  # such a list is reported where its runs are composed
                for value in [*override.sweep_string_iterator()]:
                    choices, _ = self.read([f"{override.get_key_element()}={value}"])
                    layer = self._layer(group, choices[0])
                    if layer is not None and "hydra" in layer.content:
                        text = f"{value} says for itself how a sweep runs: give it alone"
                        yield Problem(group, override.get_value_string(), text)

    def _choose(self, words: Mapping[str, str]) -> Composed:
        """Let Hydra compose choices; report those that do not compose with the ones before."""
        # Hydra's own choices first, as launchers give them.
        ordered = sorted(words, key=lambda word: not word.lstrip("+~").startswith("hydra"))
        self._require_unchanged(ordered)
        with suppress(Exception):  # overrides make Hydra raise ValueError, AssertionError and more
            return Composed(pickle.loads(self._composition(ordered)), ordered)
        made = Composed(DictConfig({}))
        for word, typed in {"": f"--config-dir={self.extra}", **words}.items():
            choices = [*made.choices, word] if word else []
            try:
                made.config = pickle.loads(self._composition(choices))
                made.choices = choices
            except Exception as error:
                group, _, option = word.partition("=")
                options, text = self.options(group), reason(error)
                if options and re.fullmatch(r"[\w.-]+", option) and option not in options:
                    text = _no_option(group, option, options)
                made.problems.append(Problem(typed, NOTHING, text))
                made.unsettled.add(group.lstrip("+~"))
                if not word:
                    raise RequestError(made.problems) from None
        return made


def _listed(override: Override) -> Any:
    """Return the value of an override in plain containers, or a list of those to choose from."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [getattr(item, "text", item) for item in value.list]
    return value


def refer_to(config: DictConfig) -> None:
    """Let ``${hydra:...}`` refer to a configuration itself: Hydra would copy it for each job."""
    HydraConfig.instance().cfg = config  # type: ignore[assignment]


def spelled_out(given: Iterable[str]) -> list[str]:
    """Return overrides with ``resume.from=`` for ``resume=``, ``model._target_=`` for a class."""
    short = re.compile(rf"^(\+*)({'|'.join(SHORT)})=(?!{{)")
    target = re.compile(rf"^({'|'.join(OPEN)})=((?:\w+\.)+[^\W\d]\w*(?:,(?:\w+\.)+[^\W\d]\w*)*)$")
    words = (target.sub(r"\1._target_=\2", word) for word in given)
    return [short.sub(lambda found: f"{found[1]}{SHORT[found[2]]}=", word) for word in words]


def _keys_of(word: str, override: Override) -> set[str]:
    """Return the keys that an override sets: as they are typed, and as they are spelled out."""
    spelled, value = override.get_key_element().lstrip("+~"), override.value()
    if isinstance(value, dict):
        return {key for key, _ in leaves(spelled, value)} - {spelled}
    return {word.partition("=")[0].lstrip("+~"), spelled}


def _set(values: Iterable[tuple[str, str, Any, bool]], made: Composed) -> None:
    """Set values, or remove the keys of those that are NOTHING, and note what is wrong with each.

    A section of ``OPEN`` takes a key that its option lacks only with a plus, or beside a target.
    """
    config = made.config
    free: tuple[str, ...] = ()  # where keys may be added without a plus
    for word, key, value, adds in values:
        section = key.partition(".")[0]
        if key == "hydra" and value is NOTHING:
            made.problems.append(Problem(word, NOTHING, "cannot be removed"))
            continue
        if section in made.unsettled.intersection(OPEN):
            continue  # its key depends on an option that does not exist
        try:
            kept: Any = config.items_ex(resolve=False, keys=[section])
            plain = {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in kept}
            for leaf, target in leaves(key, value):
                if leaf.endswith("._target_"):
                    free += (leaf.removesuffix("_target_"),)
                    if leaf == f"{section}._target_" and section in (*OPEN, "clip"):
                        _drop_arguments(config, section, plain.get(section), target)
            found = [] if adds or key.startswith(free) else [*_unknown(key, value, plain)]
            made.problems += found
            parent, _, last = key.rpartition(".")
            with open_dict(config):
                if value is NOTHING and not found:
                    (OmegaConf.select(config, parent) or {}).pop(last, None)
                elif not found:
                    OmegaConf.update(config, key, value, merge=True, force_add=True)
        except Exception as error:  # OmegaConf raises TypeError, IndexError and more for odd keys
            made.problems.append(Problem(word, NOTHING, reason(error)))


def _add_defaults_of_the_mode(config: DictConfig) -> None:
    """Add the options of a clipping mode that no file and no override gives."""
    clip = config.get("clip")
    if not isinstance(clip, DictConfig) or clip.get("_target_") is not None:
        return
    mode = clip.get("mode")
    if mode in NAMES:
        with open_dict(clip):
            for name, declared in options_of(MODES[mode]).items():
                if name not in clip:
                    clip[name] = declared.get_default(call_default_factory=True)


def _drop_arguments(config: DictConfig, section: str, given: Any, target: Any) -> None:
    """Remove what a section is ``given`` if it gets another target."""
    if isinstance(given, dict) and target not in (None, NOTHING, given.get("_target_")):
        with open_dict(config):
            for key in (one for one in given if f"{section}.{one}" not in owned_keys()):
                del config[section][key]


def _unknown(key: str, value: Any, plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the keys that are to be removed, or set in a section of ``OPEN``, and do not exist."""
    section = key.partition(".")[0]
    if section not in OPEN and value is not NOTHING:
        return  # the typed check names them
    there = dict(leaves("", plain))
    if value is NOTHING:
        there |= dict.fromkeys(owned_keys(plain))  # such as an option that has its default
    for leaf, content in leaves(key, value):
        if not any(f"{name}.".startswith(f"{leaf}.") for name in there):
            problem = unknown_key(leaf, {*owned_keys(plain), *there}, content)
            text = f"; a further argument of its _target_ is +{leaf}=VALUE"
            told = problem.message + text * (section in OPEN and "." in leaf)
            yield replace(problem, message=told)


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
    if isinstance(error, KeyValidationError) and "NoneType" in str(error):
        return "a key of a mapping must be text, a number, true or false, not null"
    kept = [line.strip() for line in lines if not line.strip().startswith(noise)]
    return " ".join(filter(None, kept)) or type(error).__name__
