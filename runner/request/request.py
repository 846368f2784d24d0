"""From the overrides of a request to its checked jobs, and to running them in Hydra's folders."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.folders import find, outputs
from runner.config.identity import digest
from runner.config.masking import hidden, masked, masked_words
from runner.config.problem import NOTHING, Problem, RequestError, leaves, shown
from runner.config.schema import SHORT, RunConfig, owned_keys
from runner.request import jobs
from runner.request.composer import OPEN, Composed, Composer, reason, refer_to
from runner.request.jobs import LAUNCHERS, Job, Where
from runner.request.recipes import purpose

_LISTED = "a list of values is a sweep: add -m; one value goes in brackets, [a,b], or in quotes"

# Keys that are set by choosing an option of a group.
_CHOSEN = {"plugin.name", "clip.mode", "precision.name", "tracker.name", "recipe"}


@dataclass(frozen=True)
class Request:
    """A request that can be run: one job in a folder, or the jobs of a sweep."""

    composer: Composer
    jobs: tuple[Job, ...]
    made: Composed  # of the job, or of what the jobs share
    folder: Path
    sweep: str = ""  # name of the sweep
    where: Where = "here"
    identity: str = ""  # of the jobs of a sweep
    trials: int | None = None  # runs that a sweeper chooses as it goes
    lists: Mapping[str, str] = field(default_factory=dict)  # overrides that list values, by key

    def run(self, work: Callable[[DictConfig], Any], folder: Path) -> Any:
        """Return what ``work`` returns; Hydra makes ``folder`` and sets up logging before."""
        config = self.made.config
        config.hydra.mode = RunMode.RUN
        config.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
        config.hydra.run.dir = str(folder).replace("${", "\\${")
        with self.composer.active():
            context = HydraContext(self.composer, Callback())  # type: ignore[arg-type]
            return run_job(work, config, "hydra.run.dir", None, context).return_value


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    config_dir: Path | None = None,
    after_each: Callable[[], object] = lambda: None,
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written.

    ``after_each`` is called after each job: there may be thousands.
    """
    composer, checked = Composer(config_dir), list[Job]()
    with composer.active():
        overrides, problems = composer.read(given)
        problems += composer.repeated(given)
        made = composer.compose([one for one in overrides if not one.is_sweep_override()])
        swept, folder = multirun or made.config.hydra.mode == RunMode.MULTIRUN, outputs()
        if swept:
            params = jobs.setting(made.config, "hydra.sweeper.params") or {}
            given_too, unread = composer.read(f"{key}={value}" for key, value in params.items())
            problems += [*unread, *jobs.launcher_problems(made.config)]
            overrides = [*{one.get_key_element(): one for one in [*given_too, *overrides]}.values()]
        listed = [one for one in overrides if one.is_sweep_override()]
        lists = {one.get_key_element(): one.input_line or "" for one in listed}
        problems += composer.sweeps_in_lists(listed)
        rows = iter([[one.input_line or "" for one in overrides if one not in listed]])
        with _noted(problems):
            folder = jobs.destination(made.config, "sweep" if swept else "run")
        with _noted(problems):
            if swept:
                rows = jobs.combined(overrides, made.config)
            elif lists:
                words = (word.partition("=") for word in lists.values())
                raise RequestError(Problem(key, value, _LISTED) for key, _, value in words)
        for number, row in enumerate(rows):
            with _noted(problems):
                one = composer.compose(composer.read(row)[0]) if swept else made
                job = jobs.job_of(one, outputs() if swept else folder, number if swept else None)
                apart = tuple(word for word in row if word.partition("=")[0] in lists)
                checked.append(replace(job, apart=apart))
            after_each()
            if len(problems) > 50:  # those of further jobs are the same, most of them
                break
        if problems:
            raise RequestError({(one.word, one.message): one for one in problems}.values())
        wanted = Request(composer, tuple(checked), made, folder, lists=lists)
        if swept:
            composer.plan()
        return _as_sweep(wanted) if swept else wanted


def _as_sweep(wanted: Request) -> Request:
    """Return the sweep of these jobs: its name follows from them, so that it is found again."""
    master, section = wanted.made.config, wanted.jobs[0].config.sweep
    search = jobs.searches(master)
    typed: Any = OmegaConf.to_container(master.hydra.overrides.hydra)
    settings = sorted([*typed, *wanted.lists.values()] if search else [])
    identity = digest([sorted(job.hash for job in wanted.jobs), settings])
    recipes = {job.config.recipe for job in wanted.jobs}
    shared = recipes - {"none"} if len(recipes) == 1 else ()
    varied = [*shared, *(key.lstrip("+") for key in wanted.lists)]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(varied))[:48].strip("-._")
    master.sweep.name = name = section.name or f"{readable or 'sweep'}-{identity[:8]}"
    folder = jobs.destination(master, "sweep")
    master.hydra.sweep.dir = str(folder).replace("${", "\\${")
    master.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
    if search and section.maximizes:
        master.hydra.sweeper.direction = "maximize"
    trials = int(jobs.setting(master, "hydra.sweeper.n_trials") or 0) if search else None
    where = LAUNCHERS[jobs.setting(master, "hydra.launcher._target_").rpartition(".")[2]]
    wanted = replace(wanted, folder=folder, sweep=name, where=where)
    return replace(wanted, identity=identity, trials=trials)


@contextmanager
def _noted(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except RequestError as error:  # the other overrides are checked too
        problems += error.problems


# -- answers to the flags that print and run nothing


def help_text(given: Sequence[str], config_dir: Path | None = None, multirun: bool = False) -> str:
    """Return the text of ``--help``, with the values that the overrides ``given`` give.

    Names of sections among them ask for the keys of these sections alone.
    """
    sections = [word for word in given if word in RunConfig.model_fields]
    words = [word for word in given if word not in sections]
    wanted = request(words, multirun=multirun, config_dir=config_dir)
    composer, config = wanted.composer, wanted.made.config
    with composer.active():
        groups = sorted(
            set(GlobalHydra.instance().config_loader().list_groups("")) - {"hydra", "recipe"}
        )
        rows = [(one, ", ".join(composer.options(one))) for one in groups]
        if sections:
            options = _table((f"{one}=", listed) for one, listed in rows if one in sections)
            return options + _keys(config, sections)
        parts = {
            "GROUPS": _table(rows),
            "RECIPES": _table((name, purpose(file)) for name, file in composer.recipes.items()),
            "KEYS": _keys(config, [*RunConfig.model_fields]),
        }
        return Template(config.hydra.help.template).safe_substitute(parts)


def composed_text(wanted: Request, part: str, package: str, resolve: bool) -> str:
    """Return the answer to ``--cfg``: the part job, hydra or all of a configuration."""
    config = wanted.made.config
    parts = {"job": {*config} - {"hydra"}, "hydra": {"hydra"}, "all": {*config}}
    with wanted.composer.active():
        refer_to(config)
        node: Any = OmegaConf.masked_copy(config, [*parts[part]])
        try:
            node = OmegaConf.select(node, package.removeprefix("_global_"), default=NOTHING)
            if node is NOTHING:
                raise RequestError([Problem("--package", package, "there is no such key")])
            if not OmegaConf.is_config(node):
                return OmegaConf.to_yaml([masked(node, package)]).removeprefix("- ")
            plain = OmegaConf.to_container(node, resolve=resolve, enum_to_str=True)
            return as_yaml(masked(_words_masked(plain), package))
        except OmegaConfBaseException as error:
            raise RequestError([Problem("--cfg", part, reason(error))]) from None


def _words_masked(plain: Any) -> Any:
    """Mask the overrides in Hydra's part of a composition, which are lists of words."""
    hydra = plain.get("hydra", plain) if isinstance(plain, dict) else {}
    overrides = hydra.get("overrides") if isinstance(hydra, dict) else None
    if isinstance(overrides, dict):
        overrides.update({name: masked_words(words) for name, words in overrides.items()})
    return plain


def as_yaml(plain: Any) -> str:
    """Return the YAML of plain containers as OmegaConf writes it, references as they are."""
    try:
        return OmegaConf.to_yaml(OmegaConf.create(plain))
    except OmegaConfBaseException:  # a text that only looks like a reference
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def answer(flags: Sequence[str], words: Sequence[str], config_dir: Path | None) -> None:
    """Print what Hydra answers to flags of its own, such as ``--info``."""
    main = hydra.main(version_base="1.3", config_path=str(find("conf")), config_name="config")
    argv, printed = sys.argv, io.StringIO()
    try:
        with Composer(config_dir).active(), redirect_stdout(printed):
            GlobalHydra.instance().clear()
            sys.argv = ["clip-runner", *flags, *words]
            main(print)()
    finally:  # Hydra exits after some answers
        sys.argv = argv
        print(hidden(printed.getvalue()), end="")


def _keys(config: DictConfig, sections: Sequence[str]) -> str:
    """Return the keys of some sections with their values in this composition, as a table."""
    rows = []
    short = {key: section for section, key in SHORT.items()}
    plain: Any = OmegaConf.to_container(config)
    owned = owned_keys(plain)
    arguments = (key for one in OPEN for key, _ in leaves(one, plain.get(one)))
    names = dict.fromkeys(name for name in (*owned, *arguments) if name not in _CHOSEN)
    for section in (one for one in plain if one in sections):
        for name in (one for one in names if one.partition(".")[0] == section):
            field = owned.get(name)
            value = OmegaConf.select(config, name, default=field and field.get_default())
            value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            meaning = (field and field.description) or ""
            text = hidden(shown(masked(value, name)))
            rows.append((f"{short.get(name, name)}={text}", meaning))
    return _table(rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"  {name:<{width}}  {rest}".rstrip() + "\n" for name, rest in rows)
