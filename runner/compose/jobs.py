"""From the overrides of a sweep to its jobs, its name and its folder."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, islice, product
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.compose.composer import Composer
from runner.compose.values import has, plain_word, reason
from runner.config.folders import obstacle, outputs
from runner.config.identity import config_hash, masked_words, request_hash, sweep_name
from runner.config.problem import NOTHING, Problem
from runner.config.schema import SHORT, RunConfig

Check: TypeAlias = Callable[
    [Composer, Sequence[Override], int | None], tuple["Job | None", list[Problem]]
]
"""Checks one job, given its overrides and its number in the sweep."""

Earlier: TypeAlias = Callable[[Path, str | None, Sequence[str]], str | None]
"""Returns why a folder must not be written by a run (None), or by a sweep with the given hash."""

Where: TypeAlias = Literal["here", "beside", "elsewhere"]
"""Where runs run: in the process of the command, in others of its machine, or anywhere."""

LAUNCHERS: Mapping[str, tuple[Where, str]] = {
    "JoblibLauncher": ("beside", "joblib"),
    "LocalLauncher": ("beside", "submitit"),
    "SlurmLauncher": ("elsewhere", "submitit"),
}
"""Launchers by the last part of their ``_target_``: where runs run, and the extra they need."""

SWEEP_WITHOUT_FLAG = (
    "a list of values is a sweep: add -m; a list as one value goes in brackets, [a,b], and text "
    "with a comma in quotes"
)

_MOST_WRONG = 10
"""Wrong jobs after which no further one is checked: most of their problems are the same."""

_UNSET = "unset"
"""Value in a list of ``sweep.zip`` that leaves its key out of the job."""


@dataclass(frozen=True)
class Job:
    """One training job of a request."""

    config: RunConfig
    plain: dict[str, Any]
    words: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The overrides that set it apart, as one line."""
        return " ".join(masked_words(self.apart))

    @cached_property
    def hash(self) -> str:
        """Hash of the configuration: 16 hexadecimal digits."""
        return config_hash(self.plain)


@dataclass(frozen=True)
class Sweep:
    """A sweep before it starts."""

    name: str
    folder: Path
    identity: str
    trials: int | None  # runs that a sweeper chooses as it goes; None if the jobs are listed
    keys: tuple[str, ...]
    words: tuple[str, ...]  # for Hydra, with the lists of values
    where: Where = "here"


class _Chosen(NamedTuple):
    words: list[str]
    apart: list[str]


def key_of(word: str) -> str:
    """Return the key of an override that is not parsed yet, without the signs before it."""
    return word.lstrip("+~").partition("=")[0]


def spelled_out(given: Iterable[str]) -> list[str]:
    """Return overrides with ``resume.from=...`` for each ``resume=...``; see ``SHORT``."""
    spelled = []
    for word in given:
        key, equals, value = word.partition("=")
        plain = key.lstrip("+")
        short = plain in SHORT and equals and not value.startswith("{")
        spelled.append(f"{key.replace(plain, SHORT[plain])}={value}" if short else word)
    return spelled


def where(target: object) -> Where:
    """Return where the runs of a launcher run, by its ``_target_``."""
    return LAUNCHERS.get(str(target).rpartition(".")[2], ("here", ""))[0]


def only_for_sweeps(overrides: Iterable[Override]) -> list[Problem]:
    """Return a problem for each override that only a sweep accepts, since none is asked for."""
    homes = re.compile(r"(sweep|hydra\.sweep|hydra[./]sweeper|hydra[./]launcher)(\.|$)")
    message = "goes with a sweep, and this is one run: add -m"
    return [
        Problem(one.get_key_element(), NOTHING if one.is_delete() else one.value(), message)
        for one in overrides
        # A list is refused as such: one run takes none.
        if not one.is_sweep_override() and homes.match(one.key_or_group)
    ]


def sweep(
    composer: Composer,
    overrides: Sequence[Override],
    check: Check,
    earlier: Earlier | None,
    writes: bool,
) -> tuple[list[Job], Sweep | None, list[Problem]]:
    """Return the jobs of a sweep, the sweep, and everything that is wrong with them."""
    fixed = [one for one in overrides if not one.is_sweep_override()]
    made = composer.compose(fixed)
    master = made.config
    if master is None:
        return [], None, made.problems
    HydraConfig.instance().set_config(master)
    search = _setting(master, "hydra.sweeper._target_", "").rpartition(".")[2]
    searches = search not in ("BasicSweeper", "RecordSweeper")
    params = [
        f"{key}={value}" for key, value in (_setting(master, "hydra.sweeper.params") or {}).items()
    ]
    listed, problems = composer.read(params)
    problems += _launcher_problems(master)
    chosen, found = _expanded(composer, [*listed, *overrides], master, searches)
    problems += found
    jobs, by_job = [], []
    for number, one in enumerate(chosen):
        job, found = check(composer, composer.read(one.words)[0], number)
        by_job.append([replace(problem, job=" ".join(one.apart)) for problem in found])
        if job is not None:
            jobs.append(replace(job, apart=tuple(one.apart)))
        if sum(map(bool, by_job)) == _MOST_WRONG:
            break
    problems += _merged(by_job)
    if problems or not jobs:
        if writes:
            problems += destination(master, "sweep", overrides, None)[1]
        return jobs, None, problems
    placed, problems = _placed(master, made.words, [*listed, *overrides], jobs, searches)
    if placed is None or not writes:
        return jobs, placed, problems
    problems += destination(master, "sweep", overrides, None)[1]
    added = [] if searches else [job.hash for job in jobs]
    if earlier and not problems and (text := earlier(placed.folder, placed.identity, added)):
        problems.append(Problem("sweep.name", placed.name, text))
    if placed.where == "elsewhere" and not shutil.which("sbatch"):
        text = "there is no sbatch here: run this on a machine that submits jobs to Slurm"
        problems.append(Problem("hydra/launcher", "submitit_slurm", text))
    return jobs, placed, problems


def _setting(master: DictConfig, key: str, default: Any = None) -> Any:
    try:
        found = OmegaConf.select(master, key, default=default)
    except OmegaConfBaseException:  # it refers to nothing, which the check of a job reports
        return default
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def destination(
    config: DictConfig, kind: str, overrides: Sequence[Override] | None, earlier: Earlier | None
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


def _launcher_problems(master: DictConfig) -> Iterator[Problem]:
    """Yield what is wrong with the launcher and the sweeper of a sweep."""
    settings = _setting(master, "hydra.launcher") or {}
    choice = _setting(master, "hydra.runtime.choices", {}).get("hydra/launcher")
    name = str(settings.get("_target_")).rpartition(".")[2]
    if settings and name != "BasicLauncher" and name not in LAUNCHERS:
        options = "(options of hydra/launcher: basic, joblib, submitit_local, submitit_slurm)"
        text = f"{name} is not known here, and could not continue a sweep  {options}"
        yield Problem("hydra/launcher", choice, text)
    extra = LAUNCHERS.get(name, ("", ""))[1]
    if extra and find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
        yield Problem("hydra/launcher", choice, f"needs pip install 'clip-runner[{extra}]'")
    counts = {"n_jobs": -1, "array_parallelism": -1, "n_trials": 1, "max_batch_size": 1}
    for section in ("launcher", "sweeper"):
        given = _setting(master, f"hydra.{section}") or {}
        for key in (key for key in counts if key in given):
            value, least = given[key], counts[key]
            fits = type(value) is int and value >= least and value != 0
            if not fits and (key, value) != ("max_batch_size", None):
                text = "must be an integer of at least 1" + (", or -1 for all" if least < 0 else "")
                yield Problem(f"hydra.{section}.{key}", value, text)
    written: Any = OmegaConf.to_container(master.hydra.sweep, resolve=False)
    subdir = str(written["subdir"])
    if "/" in re.sub(r"\$\{[^{}]*\}", "", subdir):
        text = "must name one folder, without slashes: the runs of a sweep lie in its folder"
        yield Problem("hydra.sweep.subdir", subdir, text)


def _expanded(
    composer: Composer, overrides: Sequence[Override], master: DictConfig, searches: bool
) -> tuple[list[_Chosen], list[Problem]]:
    """Return the overrides of each job: every combination of the listed values.

    Of a search, whose sweeper chooses as it goes, one job for each value stands for all.
    """
    zipped = [] if searches else list(map(str, _setting(master, "sweep.zip") or []))
    given = _setting(master, "sweep.max_jobs")
    most = given if type(given) is int and given > 0 else 1
    large = "this sweep is too large: {}; list fewer values, or raise the limit"
    values: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for one in overrides:
        key = one.get_key_element()
        if not one.is_sweep_override():
            values[key] = [plain_word(one)]
            continue
        try:
            found = _listed(one, most)
        except Exception as error:  # Hydra raises HydraException, ValueError, TypeError and more
            problems.append(Problem(key, one.get_value_string(), f"cannot be read: {error}"))
            continue
        if len(found) > most:
            text = large.format(f"{key} alone has more values")
            return [], [*problems, Problem("sweep.max_jobs", most, text)]
        options = composer.options(one.key_or_group)
        if instead := _refused(one, found, options, searches):
            problems.append(Problem(key, one.get_value_string(), f"must be {instead}"))
            continue
        words = [f"{key}={value}" for value in found]
        right = [word for word in words if not options or key in zipped]
        for word in words if options and key not in zipped else ():
            wrong = composer.compose(composer.read([word])[0]).problems
            problems += wrong
            right += [] if wrong else [word]
        values[key] = right or words[:1]  # so that the other overrides are checked too
    if zipped and (problem := _not_together(values, zipped)):
        return [], [*problems, problem]
    apart = [len(words) for key, words in values.items() if key not in zipped]
    count = prod(apart) * max((len(values[key]) for key in zipped), default=1)
    count = sum(size - 1 for size in apart) + 1 if searches else count
    if count > most:
        sizes = ", ".join(f"{key} {len(one):,}" for key, one in values.items() if len(one) > 1)
        text = large.format(f"it has {count:,} runs (values: {sizes})")
        return [], [*problems, Problem("sweep.max_jobs", most, text)]
    if searches:
        first = {key: words[0] for key, words in values.items()}
        others = ({**first, key: word} for key, words in values.items() for word in words[1:])
        combined: Iterable[dict[str, str]] = [first, *others]
    else:
        combined = _combinations(values, zipped)
    made = [
        _Chosen([*one.values()], [one[key] for key in one if len(values[key]) > 1])
        for one in combined
    ]
    return made, problems


def _listed(override: Override, most: int) -> list[str]:
    """Return the values of a list, or both ends of an interval."""
    listed = override.value()
    if isinstance(listed, RangeSweep):  # a range may have billions of values
        first = [*islice(listed.range(), most + 1)]
        if len(first) > most:
            return [str(value) for value in first]
    if isinstance(listed, IntervalSweep):
        return [str(listed.start), str(listed.end)]
    return list(override.sweep_string_iterator())


def _refused(
    override: Override, found: Sequence[str], options: Sequence[str], searches: bool
) -> str | None:
    """Return what is allowed instead of a list, to follow "must be"; None if the list is right."""
    if override.is_hydra_override():
        return "one value: Hydra's own keys cannot be swept over"
    if override.key_or_group.partition(".")[0] == "sweep":
        return "one value: all runs of a sweep share it"
    if override.is_interval_sweep() and not searches:
        return "a list of values, or range(start,stop,step)"
    if found:
        return None
    if options:
        return f"a pattern that matches one of {', '.join(options)}"
    return "a list of at least one value"


def _combinations(
    values: Mapping[str, Sequence[str]], together: Sequence[str]
) -> Iterator[dict[str, str]]:
    """Yield every combination; the lists of ``together`` count as one."""
    zipped = [key for key in values if key in together]
    groups = [zipped if key in zipped else [key] for key in values if key not in zipped[1:]]
    rows = [list(zip(*(values[key] for key in keys), strict=True)) for keys in groups]
    keys = [*chain.from_iterable(groups)]
    for chosen in product(*rows):
        one = zip(keys, chain.from_iterable(chosen), strict=True)
        yield {key: word for key, word in one if key not in zipped or word != f"{key}={_UNSET}"}


def _not_together(values: Mapping[str, list[str]], zipped: Sequence[str]) -> Problem | None:
    """Return why the lists of some keys cannot advance together."""
    if missing := [key for key in zipped if len(values.get(key, ())) < 2]:
        lists = ", ".join(key for key, choices in values.items() if len(choices) > 1) or "none"
        text = f"no list is given for {', '.join(missing)}  (lists: {lists})"
        return Problem("sweep.zip", list(zipped), text)
    lengths = {key: len(values[key]) for key in zipped}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        return Problem("sweep.zip", list(zipped), f"these lists must be equally long: {told}")
    return None


def _placed(
    master: DictConfig,
    fixed: Sequence[str],
    overrides: Sequence[Override],
    jobs: Sequence[Job],
    searches: bool,
) -> tuple[Sweep | None, list[Problem]]:
    """Return the sweep of ``jobs``: its name follows from them, so that it is found again."""
    lists = [one for one in overrides if one.is_sweep_override()]
    settings = [word for word in fixed if word.startswith(("hydra.sweeper", "hydra/sweeper"))]
    typed = [one.input_line or "" for one in lists]
    identity = request_hash((job.hash for job in jobs), [*settings, *typed] if searches else [])
    recipes = {job.config.recipe for job in jobs}
    recipe = recipes.pop() if len(recipes) == 1 else "none"
    name = jobs[0].config.sweep.name or sweep_name(
        recipe, (one.key_or_group for one in lists), identity
    )
    master = copy.deepcopy(master)
    master.sweep.name = name
    folder, problems = destination(master, "sweep", None, None)
    if folder is None:
        return None, problems
    path = str(folder).replace("${", "\\${").replace("'", "\\'")
    skipped = ("hydra.sweep.dir", "hydra.output_subdir", *(() if searches else ("hydra/sweeper",)))
    words = [word for word in fixed if key_of(word) not in skipped]
    words += [f"hydra.sweep.dir='{path}'", "hydra.output_subdir=null"]  # its files hold secrets
    if not searches:
        words.append("hydra/sweeper=clip_runner")  # runs the jobs of the record
    elif jobs[0].config.sweep.maximizes and "direction" in master.hydra.sweeper:
        key = "hydra.sweeper.direction"
        words += [] if key in map(key_of, fixed) else [f"{key}=maximize"]
    for one, word in zip(lists, typed, strict=True):
        key = one.key_or_group
        known = word.startswith("+") or key in master.hydra.runtime.choices or has(master, key)
        words.append(word if known else f"++{word}")
    trials = int(_setting(master, "hydra.sweeper.n_trials") or 0) if searches else None
    keys = tuple(dict.fromkeys(one.get_key_element() for one in lists))
    place = where(_setting(master, "hydra.launcher._target_"))
    return Sweep(name, folder, identity, trials, keys, tuple(words), place), []


def _merged(by_job: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Report a problem of every job once, and any other problem with its first job."""
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in chain.from_iterable(by_job):
        alike.setdefault((problem.word, problem.message), []).append(problem)
    return [
        replace(found[0], job="") if len(found) == len(by_job) else found[0]
        for found in alike.values()
    ]
