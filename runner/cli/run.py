"""``python -m runner [plan] [OVERRIDES]``: run what the overrides ask for, or list it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.cli.answer import Answer
from runner.cli.arguments import Arguments, checked, composed, read
from runner.cli.check import check_jobs
from runner.cli.ranks import require_same
from runner.config.environment import joins, started_rank
from runner.config.identity import digest
from runner.config.masking import masked_words
from runner.config.notation import plural
from runner.config.problem import NOTHING, Problem, RequestError
from runner.launch import resume, signals
from runner.request.answers import composed_text, help_text, print_answer_of_hydra
from runner.request.jobs import Job
from runner.request.request import Request
from runner.run_folder import files
from runner.run_folder.status import claimed
from runner.run_folder.strict_json import read_object
from runner.telemetry.sinks.console import print_line

if TYPE_CHECKING:
    from runner.sweep.control import Sweep


def run(argv: Sequence[str]) -> Answer:
    """Run the request of the arguments, or print what their flags ask for."""
    arguments = read(argv)
    if arguments.prints:
        _print_answer(arguments)
        return Answer(0)
    request = checked(arguments)
    for job in request.jobs:
        resume.require_one_machine(job.config)
    if request.sweep:
        exit_code = _sweep(request, arguments.command).start()
        return Answer(exit_code, lambda: _compared(request.folder))
    return _one_run(request)


def _print_answer(arguments: Arguments) -> None:
    """Print what ``--help``, ``--cfg`` or a flag of Hydra's own asks for."""
    if arguments.of_hydra:
        print_answer_of_hydra(arguments.of_hydra, arguments.config_dir)
        return
    request = composed(arguments)
    if arguments.help:
        print_line(help_text(request, arguments.topics).strip("\n"))
    elif arguments.cfg:
        text = composed_text(request, arguments.cfg, arguments.package, arguments.resolve)
        print(text, end="")
    else:
        choices = request.composition.choices
        print_answer_of_hydra([f"--info={arguments.info}", *choices], arguments.config_dir)


def _sweep(request: Request, command: Sequence[str]) -> "Sweep":
    from runner.sweep.control import Sweep

    started = started_rank()
    if started and started.world_size > 1:
        message = "a sweep starts its own ranks (plugin.nproc): run it once, without torchrun"
        raise RequestError([Problem("-m", NOTHING, message)])
    return Sweep(request, command, check_jobs)


def _one_run(request: Request) -> Answer:
    """Run the one job of a request in the folder of a run, or join the ranks that do."""
    [job] = request.jobs
    if started_rank() is None:
        resume.require_readable(job.config.resume.source, request.folder)
    check_jobs([job])
    require_same(job)
    if joins():
        from runner.launch.rank import join

        return Answer(join(timeout=job.config.launch.timeout))
    with signals.deferred():
        from runner.launch import supervise
        from runner.report.page import written

    folder = resume.requeued(job.plain, request.folder) or request.folder
    status = read_object(folder / files.STATUS)
    start = resume.decide(job.config, job.plain, folder)  # refuses before anything is created
    with claimed(folder):
        if read_object(folder / files.STATUS) != status:  # another run has ended here meanwhile
            start = resume.decide(job.config, job.plain, folder)
        overrides = masked_words(job.overrides)
        run = supervise.Run(job.config, job.plain, folder, overrides, start, page=written)
        failure = request.run(lambda: supervise.run(run), folder)
    exit_code = failure.exit_code if failure else 0
    return Answer(exit_code, lambda: _recorded(folder, failed=exit_code != 0))


def _recorded(folder: Path, failed: bool) -> dict[str, Any]:
    """Return what a program is told of a run that has ended: its folder, summary and error."""
    content = {"folder": str(folder), "summary": read_object(folder / files.SUMMARY)}
    error = read_object(folder / files.STATUS).get("error")
    if failed and error:
        content["error"] = str(error).strip().rpartition("\n")[2]
    return content


def _compared(folder: Path) -> dict[str, Any]:
    """Return what a program is told of a sweep: its folder, verdict, settings and commands."""
    from runner.report.exports import answer_of
    from runner.report.findings import find
    from runner.report.run import read

    return {"folder": str(folder), **answer_of(find(read(folder)))}


class Planned(NamedTuple):
    """One line of a plan."""

    number: str
    label: str
    job: Job
    done: bool


def plan(argv: Sequence[str]) -> Answer:
    """List what a command would run, without running it.

        python -m runner plan [OVERRIDES OF A RUN OR A SWEEP]

    For every run it prints the overrides that set it apart, its optimizer steps, and whether it is
    done already, and how often ranks send gradients. It creates nothing. `--json` prints one line
    of JSON.
    """
    request = checked(read(argv, "a plan"))
    check_jobs(request.jobs)
    from runner.sweep import live
    from runner.train import build

    planned = _planned(request)
    rows = [("run", "", "steps", "state")]
    runs: list[dict[str, Any]] = []
    steps_to_run: list[int | None] = []  # None: the number is unknown
    for run in planned:
        steps = build.steps_of(run.job.config, build.make_data(run.job.config.data))
        if not run.done:
            steps_to_run.append(steps)
        state = "done" if run.done else "to run"
        rows.append((run.number, run.label, "unknown" if steps is None else str(steps), state))
        runs.append({"run": run.number, "label": run.label, "steps": steps, "state": state})
    print_line(live.columns(rows))
    sentences = _sent(planned)
    for record, sentence in zip(runs, sentences, strict=True):
        record["communication"] = sentence or None
    for sentence in dict.fromkeys(filter(None, sentences)):
        print_line(sentence)
    print_line(_summary(request, len(planned), steps_to_run))
    return Answer(0, {"runs": runs, "folder": str(request.folder) if request.sweep else None})


def _sent(planned: Sequence[Planned]) -> list[str]:
    """Return how often ranks send gradients in each run; empty texts where they send none."""
    from runner.train.communication import gradients_sent
    from runner.train.model import gradient_bytes_of

    bytes_of_model: dict[str, int | None] = {}  # None: the model cannot be made without values
    sentences = []
    for run in planned:
        config = run.job.config
        setting = digest(run.job.plain["model"])
        if setting not in bytes_of_model:
            bytes_of_model[setting] = gradient_bytes_of(config.model)
        gradient_bytes = bytes_of_model[setting]
        sentences.append("" if gradient_bytes is None else gradients_sent(config, gradient_bytes))
    return sentences


def _planned(request: Request) -> list[Planned]:
    """Return the runs of a request; the runs of a sweep in the order of their numbers."""
    from runner.sweep.resume import plan_runs

    jobs = {job.hash: job for job in request.jobs}
    planned = [
        Planned(str(entry.number), entry.label, jobs[entry.config_hash], entry.state == "finished")
        for entry in plan_runs(request)
    ]
    if planned:
        return planned
    number = "" if request.sweep else "0"
    return [Planned(number, job.label, job, done=False) for job in request.jobs]


def _summary(request: Request, count: int, steps_to_run: Sequence[int | None]) -> str:
    """Return the last line of a plan: what is left to run, and where."""
    if not request.sweep:
        return "one run, in a folder of its own in outputs/runs"
    if request.trials is not None:
        runs = f"{plural(request.trials, 'run')} that the sweeper chooses as it goes"
        return f"{runs}, of the kinds above, in {request.folder}"
    text = f"{len(steps_to_run)} of {count} to run"
    numbers = [steps for steps in steps_to_run if steps is not None]
    if len(numbers) == len(steps_to_run):
        text += f", {plural(sum(numbers), 'step')}"
    return f"{text}, in {request.folder}"
