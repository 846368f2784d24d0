"""From the overrides of a request to its checked jobs, and to running them in Hydra's folders."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.config import jobs, recipes
from runner.config.composer import OPEN, Composed, Composer, reason, refer_to, spelled_out
from runner.config.folders import CONFIG_NAME, find, outputs
from runner.config.jobs import Job, Sweep
from runner.config.problem import NOTHING, Problem, RequestError, leaves, shown
from runner.config.schema import SHORT, RunConfig, owned_keys

_LISTED = "a list of values is a sweep: add -m; one value goes in brackets, [a,b], or in quotes"

_MOST = 50  # problems after which no further job is checked: most of them are the same

# Keys that are set by choosing an option of a group.
_CHOSEN = {"plugin.name", "clip.mode", "precision.name", "tracker.name", "recipe"}


@dataclass(frozen=True)
class Request:
    """A request that can be run: one job in a folder, or the jobs of a sweep."""

    composer: Composer
    jobs: tuple[Job, ...]
    made: Composed  # of the job, or of what the jobs share
    folder: Path
    sweep: Sweep | None = None

    def run(self, work: Callable[[DictConfig], Any], folder: Path) -> Any:
        """Return what ``work`` returns; Hydra makes ``folder`` and sets up logging before."""
        config = self.made.config
        config.hydra.mode = RunMode.RUN
        config.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
        config.hydra.run.dir = str(folder).replace("${", "\\${")
        with self.composer.active():
            context = HydraContext(self.composer, Callback())  # type: ignore[arg-type]
            return run_job(work, config, "hydra.run.dir", None, context).return_value

    def launch(
        self,
        work: Callable[[DictConfig], Any],
        waiting: Sequence[tuple[int, Sequence[str]]],
        file: Path,
    ) -> None:
        """Let Hydra's launcher, or the sweeper of a search, call ``work`` for each job.

        ``waiting`` has the number and the overrides of each. What Hydra composed the sweep from is
        written to ``file``.
        """
        assert self.sweep is not None
        config = self.made.config
        with self.composer.active():
            refer_to(config)
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
            file.write_text(jobs.as_yaml(jobs.unresolved_composition(config)), encoding="utf-8")
            context = HydraContext(self.composer, Callback())  # type: ignore[arg-type]
            given: Any = {"hydra_context": context, "task_function": work, "config": config}
            if self.sweep.trials is not None:
                if params := jobs.setting(config, "hydra.sweeper.params"):
                    words = spelled_out(f"{key}={value}" for key, value in params.items())
                    config.hydra.sweeper.params = dict(word.split("=", 1) for word in words)
                typed: Any = OmegaConf.to_container(config.hydra.overrides.task)  # references too
                sweeper = Plugins.instance().instantiate_sweeper(**given)
                sweeper.sweep([*typed, *self.sweep.lists.values()])
                return
            launcher = Plugins.instance().instantiate_launcher(**given)
            # Hydra numbers the runs of one launch without a gap.
            for _, numbered in groupby(enumerate(waiting), lambda one: one[1][0] - one[0]):
                batch = [one for _, one in numbered]
                for ended in launcher.launch([words for _, words in batch], batch[0][0]):
                    _ = ended.return_value  # raises what a job raised


def request(
    given: Sequence[str], *, multirun: bool = False, config_dir: Path | None = None
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written."""
    composer = Composer(config_dir)
    checked: list[Job] = []
    sweep, folder = None, outputs()
    with composer.active():
        overrides, problems = composer.read(given)
        fixed = [one for one in overrides if not one.is_sweep_override()]
        made = composer.compose(fixed)
        swept = multirun or made.config.hydra.mode == RunMode.MULTIRUN
        if swept:
            params = jobs.setting(made.config, "hydra.sweeper.params") or {}
            given_too, unread = composer.read(f"{key}={value}" for key, value in params.items())
            problems += [*unread, *jobs.launcher_problems(made.config)]
            overrides = [*{one.get_key_element(): one for one in [*given_too, *overrides]}.values()]
            fixed = [one for one in overrides if not one.is_sweep_override()]
        lists = {
            one.get_key_element(): one.input_line or ""
            for one in overrides
            if one.is_sweep_override()
        }
        rows = iter([[one.input_line or "" for one in fixed]])
        with _noted(problems):
            folder = jobs.destination(made.config, "sweep" if swept else "run")
        with _noted(problems):
            if swept:
                rows = jobs.combined(overrides, made.config)
            elif lists:
                listed = (word.partition("=") for word in lists.values())
                raise RequestError(Problem(key, value, _LISTED) for key, _, value in listed)
        for number, row in enumerate(rows):
            with _noted(problems):
                one = composer.compose(composer.read(row)[0]) if swept else made
                job = jobs.job_of(one, outputs() if swept else folder, number if swept else None)
                apart = tuple(word for word in row if word.partition("=")[0] in lists)
                checked.append(replace(job, apart=apart))
            if len(problems) > _MOST:
                break
        if swept and not problems:
            sweep = jobs.placed(made.config, checked, lists)
            folder = sweep.folder
    if problems:
        raise RequestError({(one.word, one.message): one for one in problems}.values())
    return Request(composer, tuple(checked), made, folder, sweep)


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
        groups = sorted(set(composer.loader.list_groups("")) - {"hydra", "recipe"})
        rows = [(one, ", ".join(composer.options(one))) for one in groups]
        if sections:
            options = _table((f"{one}=", listed) for one, listed in rows if one in sections)
            return options + _keys(config, sections)
        parts = {
            "GROUPS": _table(rows),
            "RECIPES": _table((one.name, one.purpose) for one in recipes.read_all(config_dir)),
            "KEYS": _keys(config, [*RunConfig.model_fields]),
        }
        return Template(config.hydra.help.template).safe_substitute(parts)


def composed_text(wanted: Request, part: str, package: str, resolve: bool) -> str:
    """Return the answer to ``--cfg``: the part job, hydra or all of a configuration."""
    config = wanted.made.config
    left_out = {"job": ["hydra"], "hydra": {*config} - {"hydra"}, "all": []}[part]
    with wanted.composer.active():
        refer_to(config)
        node = copy.deepcopy(config)
        with open_dict(node):
            for key in left_out:
                del node[key]
        try:
            if package not in ("", "_global_"):
                node = OmegaConf.select(node, package, default=NOTHING)
            if node is NOTHING:
                raise RequestError([Problem("--package", package, "there is no such key")])
            is_node = OmegaConf.is_config(node)
            return OmegaConf.to_yaml(node, resolve=resolve) if is_node else f"{node}\n"
        except OmegaConfBaseException as error:
            raise RequestError([Problem("--cfg", part, reason(error))]) from None


def answer(flags: Sequence[str], words: Sequence[str], config_dir: Path | None) -> None:
    """Print what Hydra answers to flags of its own, such as ``--info``."""
    main = hydra.main(version_base="1.3", config_path=str(find("conf")), config_name=CONFIG_NAME)
    argv, printed = sys.argv, io.StringIO()
    try:
        with Composer(config_dir).active(), redirect_stdout(printed):
            GlobalHydra.instance().clear()
            sys.argv = ["clip-runner", *flags, *words]
            main(print)()
    finally:  # Hydra exits after some answers
        sys.argv = argv
        print(printed.getvalue(), end="")


def _keys(config: DictConfig, sections: Sequence[str]) -> str:
    """Return the keys of some sections with their values in this composition, as a table."""
    rows = []
    short = {key: section for section, key in SHORT.items()}
    plain: Any = OmegaConf.to_container(config)
    owned = owned_keys(plain)
    leaf = [key for one in OPEN if one in plain for key, _ in leaves(one, plain[one])]
    names = [key for key in dict.fromkeys([*owned, *leaf]) if key not in _CHOSEN]
    listed = (one for one in plain if one in sections)
    for name in (key for one in listed for key in names if key.partition(".")[0] == one):
        field = owned.get(name)
        value = OmegaConf.select(config, name, default=field and field.get_default())
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        meaning = (field and field.description) or ""
        rows.append((f"{short.get(name, name)}={shown(value)}", meaning))
    return _table(rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"  {name:<{width}}  {rest}".rstrip() + "\n" for name, rest in rows)
