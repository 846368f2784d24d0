"""Checks of jobs that need torch: targets, data, device and clipping mode."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from runner.config.environment import started_rank
from runner.config.identity import digest
from runner.config.notation import plural
from runner.config.problem import Problem, RequestError
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.request.jobs import Job
from runner.request.sweep_settings import Place
from runner.telemetry.sinks.console import announce, print_line


def check_jobs(jobs: Sequence[Job], place: Place = "here") -> None:
    """Refuse jobs that cannot be trained, by all their problems; print notes on the others."""
    started = started_rank()
    on_this_machine = place != "elsewhere"
    if on_this_machine and started is None:
        _require_few_ranks(jobs)
    if "torch" not in sys.modules:
        announce("clip-runner: importing torch, then checking model and data")
    from runner.launch.prepare import importing_torch, prepare

    if place == "here" and (started is None or started.world_size == 1):
        # Ranks import torch while this process does.
        prepare(*(job.config for job in jobs))
    with importing_torch():
        problems = _problems(jobs, on_this_machine)
    if problems:
        raise RequestError(problems)
    starts_ranks = on_this_machine and started is None
    notes = {note for job in jobs for note in _notes(job.config, starts_ranks)}
    for note in sorted(notes):
        print_line(f"clip-runner: note: {note}", sys.stderr)


def _require_few_ranks(jobs: Sequence[Job]) -> None:
    """Refuse more ranks than cores can share before any is prepared, where there is no GPU."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists():
        return  # the check with torch counts the GPUs
    problems = []
    for job in jobs:
        plugin = job.config.plugin
        problem = plugin.too_many_ranks(plugin.least_ranks)
        if problem is not None:
            problems.append(replace(problem, job=job.label))
    if problems:
        raise RequestError(problems)


def _problems(jobs: Sequence[Job], on_this_machine: bool) -> list[Problem]:
    """Return what is wrong with targets of a record, or else with the training of the jobs."""
    with signals.deferred():
        from runner.train import preflight, targets

    problems = [problem for job in jobs for problem in targets.problems(job.targets)]
    if problems:
        return problems
    weights = preflight.ComparedWeights()
    for job in _distinct(jobs):
        try:
            preflight.check(
                job.config, compared=len(jobs) > 1, here=on_this_machine, weights=weights
            )
        except RequestError as error:
            problems += [replace(problem, job=job.label) for problem in error.problems]
    return problems


def _distinct(jobs: Sequence[Job]) -> list[Job]:
    """Return one job, the last, of those that differ in their seed alone."""
    by_setting = {digest({**job.plain, "seed": 0}): job for job in jobs}
    return list(by_setting.values())


def _notes(config: RunConfig, starts_ranks: bool) -> Iterator[str]:
    """Yield what a user may not expect of a job that can be trained."""
    from runner.train import build

    samples, samples_of_step = build.samples_of(config)
    if samples is not None and samples_of_step > samples:
        yield (
            f"a step has all {plural(samples, 'sample', ',')} of the data, not "
            f"{samples_of_step:,}: lower data.batch_size"
        )
    if starts_ranks and config.plugin.may_grow and build.ranks_of(config) == 1:
        yield (
            f"plugin={config.plugin.name} runs on one rank: plugin.nproc is not given, and "
            "this run uses at most one GPU. plugin.nproc=2 starts two ranks."
        )
