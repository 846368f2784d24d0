"""Jobs: a composition checked and as it is recorded; every job of a sweep, its name and folder.

Training uses the resolved configuration. Files, pages and wandb get the recorded form, in which
values of the environment stay references, and secrets are masked.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, islice, product
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.config.folders import Refusal, read_yaml
from runner.config.identity import NOT_HASHED, config_hash
from runner.config.masking import (
    is_recorded,
    masked,
    masked_words,
    remember,
    remembered,
    secrets_in,
)
from runner.config.ordinary import show_path
from runner.config.plugin_section import read_plan
from runner.config.problem import NOTHING, Problem, RequestError, leaves
from runner.config.schema import SHORT, RunConfig, examine
from runner.config.trust import Origin, Recorded, unknown
from runner.request.composer import Composed, Composer, reason, refer_to

Where: TypeAlias = Literal["here", "beside", "elsewhere"]
"""Where runs run: in the process of the command, in others of its machine, or anywhere."""

LAUNCHERS: Mapping[str, Where] = {
    "BasicLauncher": "here",
    "JoblibLauncher": "beside",
    "LocalLauncher": "beside",
    "SlurmLauncher": "elsewhere",
}
"""Where the runs of a launcher run, by the last part of its ``_target_``."""


@dataclass(frozen=True)
class Job:
    """One training job of a request."""

    config: RunConfig
    plain: dict[str, Any]  # as it is recorded
    words: tuple[str, ...] = ()  # its overrides
    apart: tuple[str, ...] = ()  # overrides that set it apart from the other jobs
    targets: tuple[Recorded, ...] = ()  # from a record: their types are to be checked

    @property
    def label(self) -> str:
        return " ".join(masked_words(self.apart))

    @cached_property
    def hash(self) -> str:
        return config_hash(self.plain)


def job_of(
    made: Composed, folder: Path, number: int | None = None, origin: Origin | None = None
) -> Job:
    """Return the job of a composition, in its folder or as this ``number`` of a sweep.

    ``origin`` tells which of its targets a record has named. A RequestError says everything that
    is wrong with it.
    """
    hydra, problems = made.config.hydra, [*made.problems]
    if number is not None:  # as the launcher of a sweep does
        hydra.job.update(num=number, id=str(number))
    hydra.runtime.output_dir = str(folder)
    refer_to(made.config)
    config = pickle.loads(pickle.dumps(made.config))
    with open_dict(config):
        del config.hydra
    try:
        resolved, plain = resolved_and_recorded(config)
    except OmegaConfBaseException as error:  # a value refers to something that does not exist
        written: Any = OmegaConf.to_container(config)
        resolved = plain = written
        key = str(error.full_key)
        text = dict(leaves("", written)).get(key, NOTHING)
        problems.append(Problem(key, text, f"cannot be resolved: {reason(error)}"))
    targets = [] if origin is None or resolved.get("trust") is True else origin.recorded(resolved)
    if strange := unknown(targets):  # before the check imports the class of a mode
        raise RequestError(strange)
    typed, found = examine(resolved, made.unsettled)
    known = {one.key for one in problems}
    problems += (one for one in found if one.key not in known)
    if typed is None or problems:
        raise RequestError(problems)
    words: Any = OmegaConf.to_container(hydra.overrides.task)
    return Job(typed, plain, tuple(words), targets=tuple(targets))


def resolved_and_recorded(config: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a job's configuration in plain containers: resolved, and as it is recorded."""
    written: Any = OmegaConf.to_container(config, resolve=False)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    clip, plugin = resolved.get("clip"), resolved.get("plugin")
    if isinstance(clip, dict) and isinstance(clip.get("_target_"), str):
        clip["mode"] = clip["_target_"].rpartition(".")[2]
    if isinstance(plugin, dict) and isinstance(plugin.get("tp_plan"), str):
        # Ranks and the record get the plan, not the path of its file; the check says what is wrong.
        with suppress(ValueError):
            plugin["tp_plan"] = read_plan(plugin["tp_plan"])
    secrets = {*secrets_in(written), *secrets_in(resolved)} - {""}
    remember(secrets)
    # Values that others refer to, of the environment too: what quotes them stays a reference.
    referred = secrets | _from_environment(written, resolved)

    def recorded(text: Any, value: Any) -> Any:
        """Return ``value``, but as it is written if it comes from the environment or a secret."""
        if isinstance(text, dict) and isinstance(value, dict):
            return {name: recorded(text.get(name), item) for name, item in value.items()}
        if isinstance(text, list) and isinstance(value, list):
            return [recorded(*pair) for pair in zip(text, value, strict=True)]
        quotes = any(secret in str(value) for secret in referred)
        return text if "${" in str(text) and (quotes or "oc.env:" in str(text)) else value

    return resolved, masked(recorded(written, resolved), known=secrets)


def _from_environment(text: Any, value: Any) -> set[str]:
    """Return the values that are written with a variable of the environment."""
    if isinstance(text, dict) and isinstance(value, dict):
        parts = [_from_environment(text.get(name), item) for name, item in value.items()]
    elif isinstance(text, list) and isinstance(value, list):
        parts = [_from_environment(*pair) for pair in zip(text, value, strict=True)]
    else:
        return {str(value)} - {""} if "oc.env:" in str(text) else set()
    return set().union(*parts)


def write_composition(home: Path, config: DictConfig) -> None:
    """Write the files of the run that Hydra has just begun to ``home``, but without secrets."""
    hydra = unresolved(HydraConfig.instance().cfg)["hydra"]
    plain: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    content = masked(plain, known=remembered())
    home.mkdir(exist_ok=True)
    parts = {"config": content, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    for name, part in parts.items():
        write_yaml(home / f"{name}.yaml", part)


def unresolved(config: Any) -> dict[str, Any]:
    """Return a composition in plain containers, references unresolved, without secrets."""
    content: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    job, overrides = content["hydra"]["job"], content["hydra"]["overrides"]
    # Hydra has copied the values of these into env_set.
    job["env_set"] |= {name: f"${{oc.env:{name}}}" for name in job["env_copy"]}
    overrides |= {part: masked_words(words) for part, words in overrides.items()}
    job["override_dirname"] = ",".join(overrides["task"])
    return dict(masked(content, known=remembered()))


def write_yaml(file: Path, content: Any) -> None:
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def recorded(file: Path, given: Sequence[str], config_dir: Path | None = None) -> Job:
    """Return the job that the configuration file of a run describes, with overrides."""
    try:
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise Refusal(f"{file} holds no configuration")
    except Refusal as error:
        raise RequestError([Problem("RUN", str(file.parent), str(error))]) from None
    content.pop("trust", None)  # the user trusts a folder, not the folder itself
    composer, origin = Composer(config_dir), Origin()
    if config_dir is not None:
        origin.add_folder(config_dir)
    with composer.active():
        overrides, problems = composer.read(given)
        problems += composer.repeated(given)
        text = "must be one value of this run's configuration: the run is trained already"
        for one in [*overrides]:
            if one.is_sweep_override() or one.is_hydra_override() or one.key_or_group == "recipe":
                overrides.remove(one)
                problems.append(Problem(one.key_or_group, one.get_value_string(), text))
        made = composer.compose(overrides, content)
        made.problems += problems
        for one in overrides:
            chosen = composer.chooses(one)
            origin.add(one.get_key_element().lstrip("+~"), one.value(), whole=chosen)
        for key, value in leaves("", OmegaConf.to_container(made.config)):
            masks = not is_recorded(str(value))
            if masks and key.partition(".")[0] not in NOT_HASHED:
                text = f"is a secret, which is not recorded: give it again ({key}=???)"
                made.problems.append(Problem(key, NOTHING, text))
        return job_of(made, file.parent, origin=origin)


def destination(config: DictConfig, kind: str) -> Path:
    """Return the folder of a run or a sweep."""
    refer_to(config)
    key = f"hydra.{kind}.dir"
    try:
        path = Path(str(OmegaConf.select(config, key, throw_on_missing=True))).absolute()
    except (OmegaConfBaseException, ValueError) as error:
        problem = Problem(key, NOTHING, f"cannot be resolved: {reason(error)}")
        raise RequestError([problem]) from None
    show_path(path)
    return path


def searches(master: DictConfig) -> bool:
    """Return whether a sweeper chooses the runs as it goes, as Optuna does."""
    return not str(setting(master, "hydra.sweeper._target_")).endswith(".BasicSweeper")


def setting(master: DictConfig, key: str) -> Any:
    try:
        found = OmegaConf.select(master, key)
    except OmegaConfBaseException:  # it refers to nothing, which the check of a job reports
        return None
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def launcher_problems(master: DictConfig) -> Iterator[Problem]:
    """Yield what is wrong with the launcher of a sweep, and the names of its folders."""
    target = str(setting(master, "hydra.launcher._target_")).split(".")
    choice = str(master.hydra.runtime.choices.get("hydra/launcher"))
    if target[-1] not in LAUNCHERS:
        text = f"{target[-1]} is not known here, and could not continue a sweep"
        yield Problem("hydra/launcher", choice, text)
    elif find_spec(".".join(target[:2])) is None:
        text = f"needs pip install 'clip-runner[{choice.partition('_')[0]}]'"
        yield Problem("hydra/launcher", choice, text)
    if target[-1] == "SlurmLauncher":
        for key in ("nodes", "tasks_per_node"):
            count = setting(master, f"hydra.launcher.{key}")
            if count not in (1, None):
                text = (
                    "must be 1: a run of a sweep is one task, which starts its ranks (plugin.nproc)"
                )
                yield Problem(f"hydra.launcher.{key}", count, text)
    subdir = OmegaConf.to_container(master.hydra.sweep)["subdir"]  # type: ignore[index, call-overload]
    if subdir != "${hydra.job.num}":
        text = "cannot be chosen: the runs of a sweep lie in its folder by their numbers"
        yield Problem("hydra.sweep.subdir", subdir, text)


def combined(overrides: Iterable[Override], master: DictConfig) -> Iterator[list[str]]:
    """Return the overrides of each job: every combination of the lists.

    Of a search, whose sweeper chooses as it goes, they have each value of a list once at least.
    """
    search = searches(master)
    given = setting(master, "sweep.max_jobs")
    most = given if type(given) is int and given > 0 else 1
    values: dict[str, list[list[str]]] = {}  # the overrides of each key, for each of its values
    problems = []
    for one in overrides:
        key = one.get_key_element()
        try:
            values[key] = [[word] for word in _words(one, most, search)]
        except Exception as error:  # Hydra raises HydraException, ValueError, TypeError and more
            problems.append(Problem(key, one.get_value_string(), str(error)))
    sizes = ", ".join(f"{key} {len(one):,}" for key, one in values.items() if len(one) > 1)
    asked = None if search else setting(master, "sweep.zip")
    zipped = [str(one).lstrip("+") for one in asked] if isinstance(asked, list) else []
    columns = {}  # the list of each zipped key, which may be typed for short
    for name in zipped:
        spelled = (name, f"{name}._target_", SHORT.get(name))
        columns[name] = next((key for key in values if key.lstrip("+") in spelled), "")
    counts = {name: len(values.get(key, [[]])) for name, key in columns.items()}
    unlisted = [name for name, count in counts.items() if count == 1]
    if unlisted:
        lists = ", ".join(key.lstrip("+") for key, one in values.items() if len(one) > 1)
        text = (
            f"{', '.join(unlisted)}: no list of values in this sweep (its lists: {lists or 'none'})"
        )
        problems.append(Problem("sweep.zip", zipped, text))
    elif len({*counts.values()}) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        problems.append(Problem("sweep.zip", zipped, f"these lists must be equally long: {told}"))
    if problems:
        raise RequestError(problems)
    if zipped:
        first, *others = (key for key in values if key in columns.values())
        rows = zip(values[first], *map(values.pop, others), strict=True)
        # unset leaves a key out of the job.
        values[first] = [[one for one in chain(*row) if not one.endswith("=unset")] for row in rows]
    axes = [*values.values()]
    count = max(map(len, axes), default=1) if search else prod(map(len, axes))
    if count > most:
        text = f"this sweep has {count:,} runs or more (values: {sizes}); list fewer values, or "
        raise RequestError([Problem("sweep.max_jobs", most, f"{text}raise the limit")])
    chosen = ([axis[n % len(axis)] for axis in axes] for n in range(count))
    return ([*chain(*parts)] for parts in (chosen if search else product(*axes)))


def _words(override: Override, most: int, search: bool) -> Iterable[str]:
    """Return an override for each value of a list, ``most`` + 1 at most, or for both ends."""
    key, listed = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if override.is_hydra_override() or override.key_or_group.partition(".")[0] == "sweep":
        raise ValueError("must be one value: all runs of a sweep share it")
    if isinstance(listed, IntervalSweep):
        if not search:
            raise ValueError("must be a list of values, or range(start,stop,step)")
        return [f"{key}={listed.start}", f"{key}={listed.end}"]
    # A range may have billions of values.
    found = [*islice(listed.range(), most + 1)] if isinstance(listed, RangeSweep) else []
    if len(found) <= most:
        found = [*override.sweep_string_iterator()]
    if not found:
        raise ValueError("must have at least one value")
    return (f"{key}={value}" for value in found)
