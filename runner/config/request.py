"""From the overrides of a request to its checked jobs, and to running them in Hydra's folders."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import hydra
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from runner.config import recipes
from runner.config.composer import OPEN, Composer, recipe_folders, spelled_out
from runner.config.folders import CONFIG_NAME, find
from runner.config.jobs import Sweep, destination, job_of, sweep
from runner.config.problem import Problem, RequestError, leaves, shown
from runner.config.record import Job, as_yaml, unresolved_composition
from runner.config.schema import SHORT, RunConfig, owned_keys

T = TypeVar("T")

# Keys that are set by choosing an option of a group.
_CHOSEN = {"plugin.name", "clip.mode", "precision.name", "tracker.name", "recipe"}


@dataclass(frozen=True)
class Request:
    """A request that can be run: one job in a folder, or the jobs of a sweep."""

    composer: Composer
    jobs: tuple[Job, ...]
    sweep: Sweep | None = None
    composed: DictConfig | None = None
    folder: Path | None = None

    def run(self, work: Callable[[Path], T], folder: Path | None = None) -> T:
        """Call ``work`` with the folder of the run, in which Hydra has set up logging."""
        composed = self.composed
        assert composed is not None
        with read_write(composed.hydra):
            composed.hydra.mode = RunMode.RUN
            composed.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
            composed.hydra.run.dir = str(folder or self.folder).replace("${", "\\${")
        with self.composer.active(), _logging_restored():
            ended = run_job(
                lambda _: work(Path(composed.hydra.runtime.output_dir)),
                composed,
                "hydra.run.dir",
                None,
                self._context(),
            )
            returned: T = ended.return_value
            return returned

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
        with self.composer.active(), _logging_restored():
            config = compose(CONFIG_NAME, [*self.sweep.words], return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
            file.write_text(as_yaml(unresolved_composition(config)), encoding="utf-8")
            if params := OmegaConf.select(config, "hydra.sweeper.params"):
                words = spelled_out(f"{key}={value}" for key, value in params.items())
                with read_write(config.hydra):
                    config.hydra.sweeper.params = dict(word.split("=", 1) for word in words)
            given: Any = {"hydra_context": self._context(), "task_function": work, "config": config}
            if self.sweep.trials is not None:
                typed: Any = OmegaConf.to_container(config.hydra.overrides.task)  # references too
                Plugins.instance().instantiate_sweeper(**given).sweep([*typed, *self.sweep.lists])
                return
            launcher = Plugins.instance().instantiate_launcher(**given)
            # Hydra numbers the runs of one launch without a gap.
            for _, numbered in groupby(enumerate(waiting), lambda one: one[1][0] - one[0]):
                batch = [one for _, one in numbered]
                for ended in launcher.launch([words for _, words in batch], batch[0][0]):
                    _ = ended.return_value  # raises what a job raised

    def _context(self) -> HydraContext:
        return HydraContext(self.composer.loader, Callback())  # type: ignore[arg-type]


def request(
    given: Sequence[str], *, multirun: bool = False, config_dir: Path | None = None
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written."""
    composer = Composer(config_dir)
    placed = folder = None
    jobs: Sequence[Job] = ()
    with composer.active():
        overrides, problems = composer.read(given)
        made = composer.compose([one for one in overrides if not one.is_sweep_override()])
        if multirun or made.config.hydra.mode == RunMode.MULTIRUN:
            jobs, placed, found = sweep(composer, made, overrides)
        else:
            folder, found = destination(made.config, "run")
            text = (
                "a list of values is a sweep: add -m; a list as one value goes in brackets, "
                "[a,b], and text with a comma in quotes"
            )
            listed = (one for one in overrides if one.is_sweep_override())
            found += (
                Problem(one.get_key_element(), one.get_value_string(), text) for one in listed
            )
            try:
                jobs = [job_of(made, folder)]
            except RequestError as error:
                found += error.problems
    if problems := [*problems, *found]:
        raise RequestError({(one.word, one.message): one for one in problems}.values())
    return Request(composer, tuple(jobs), placed, None if placed else made.config, folder)


@contextmanager
def _logging_restored() -> Iterator[None]:
    """Close the log files that Hydra opens, and restore the caller's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


# -- answers to the flags that print and run nothing


def help_text(given: Sequence[str], config_dir: Path | None = None, multirun: bool = False) -> str:
    """Return the text of ``--help``, with the values that the overrides ``given`` give.

    Names of sections among them ask for the keys of these sections alone.
    """
    sections = [word for word in given if word in RunConfig.model_fields]
    words = [word for word in given if word not in sections]
    wanted = request(words, multirun=multirun, config_dir=config_dir)
    composer = wanted.composer
    with composer.active():
        config = wanted.composed or composer.compose([]).config  # a sweep has no single values
        groups = sorted(set(composer.loader.list_groups("")) - {"hydra", "recipe"})
        rows = ((one, ", ".join(composer.options(one))) for one in groups)
        if sections:
            options = _table((f"{one}=", listed) for one, listed in rows if one in sections)
            return options + _keys(config, sections)
        found = recipes.read_all(recipe_folders(config_dir))
        parts = {
            "GROUPS": _table(rows),
            "RECIPES": _table((recipe.name, recipe.error or recipe.purpose) for recipe in found),
            "KEYS": _keys(config, [*RunConfig.model_fields]),
        }
        return Template(config.hydra.help.template).safe_substitute(parts)


def answer(flags: Sequence[str], words: Sequence[str], config_dir: Path | None) -> int:
    """Print what Hydra answers to flags of its own, such as ``--cfg``; return its exit code."""
    folder, printed, code, argv = str(find("conf")), io.StringIO(), 0, sys.argv
    main = hydra.main(version_base="1.3", config_path=folder, config_name=CONFIG_NAME)(print)
    with Composer(config_dir).active(), _logging_restored(), redirect_stdout(printed):
        GlobalHydra.instance().clear()
        sys.argv = ["clip-runner", *flags, *words]
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv = argv
    print(printed.getvalue(), end="")
    return code


def _keys(config: DictConfig, sections: Sequence[str]) -> str:
    """Return the keys of some sections with their values in this composition, as a table."""
    rows = []
    short = {key: section for section, key in SHORT.items()}
    plain: Any = OmegaConf.to_container(config)
    owned = owned_keys(plain)
    arguments = [key for one in OPEN for key, _ in leaves(one, plain[one]) if key not in owned]
    for name in sorted([*owned, *arguments], key=lambda key: [*plain].index(key.partition(".")[0])):
        if name in _CHOSEN or name.partition(".")[0] not in sections:
            continue
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
