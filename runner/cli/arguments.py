"""What a person types, as a request: flags by argparse, overrides composed and checked.

torch is imported only after the overrides are validated, so that a wrong key, ``--help`` and
``--cfg`` cost no more than Python and Hydra do.
"""

import argparse
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from runner.cli import Parser, existing_folder
from runner.config.environment import joins
from runner.config.folders import Refusal, read_yaml
from runner.config.identity import differences
from runner.config.masking import masked_words
from runner.config.problem import NOTHING, Problem, RequestError
from runner.launch import signals
from runner.request.request import Request, request
from runner.run_folder import files
from runner.run_folder.status import earlier_run, earlier_sweep
from runner.run_folder.strict_json import obstacle, read_object

_COMPLETIONS = [
    f"{action}={shell}"
    for action in ("install", "uninstall", "query")
    for shell in ("bash", "fish", "zsh")
]

_NAME = re.compile(r"\w+(\.\w+)*")  # of a section or a key


class Arguments(argparse.Namespace):
    """Overrides and flags. Flags that a command does not have keep these values."""

    overrides: Sequence[str] = ()
    config_dir: Path | None = None
    multirun: bool = False
    # Flags that print and run nothing
    help: bool = False
    topics: Sequence[str] = ()  # --help is about these alone
    cfg: str | None = None
    info: str | None = None
    hydra_help: bool = False
    shell_completion: str | None = None
    # Flags of --cfg
    package: str = ""
    resolve: bool = False

    @property
    def prints(self) -> bool:
        """Whether a flag asks for an answer instead of a run."""
        flags = (self.help, self.cfg, self.info, self.hydra_help, self.shell_completion)
        return any(flags)

    @property
    def of_hydra(self) -> list[str]:
        """The arguments for Hydra, if it answers them without our check of the overrides."""
        if self.hydra_help:
            return ["--hydra-help", *self.overrides]
        if self.shell_completion:
            return ["-sc", self.shell_completion, *self.overrides]
        return []

    @property
    def command(self) -> list[str]:
        """The arguments as a page repeats them, from any folder."""
        flags = ["-m"] if self.multirun else []
        if self.config_dir:
            flags += ["--config-dir", str(self.config_dir)]
        return [*flags, *self.overrides]


def read(argv: Sequence[str], purpose: str = "a run") -> Arguments:
    """Return overrides and Hydra's flags, which may stand in any order."""
    parser = _parser(purpose)
    arguments, overrides = parser.parse_known_args(argv, namespace=Arguments())
    unknown = [text for text in overrides if text.startswith("-")]
    if unknown:
        raise RequestError(Problem(flag, NOTHING, _why_unknown(flag, purpose)) for flag in unknown)
    if not arguments.cfg:
        flags = ["--resolve"] if arguments.resolve else []
        flags += ["--package"] if arguments.package else []
        if flags:
            message = "goes with --cfg, which runs nothing"
            raise RequestError(Problem(flag, NOTHING, message) for flag in flags)
    if arguments.help:
        arguments.topics = [text for text in overrides if _NAME.fullmatch(text)]
    arguments.overrides = [text for text in overrides if text not in arguments.topics]
    return arguments


def _why_unknown(flag: str, purpose: str) -> str:
    """Return what to type instead of a flag that does not exist."""
    if re.match(r"--?\w+(\.\w+)*=", flag):
        return f"a key has no dashes: {flag.lstrip('-')}"
    return f"unknown flag of {purpose}; --help and --hydra-help list the flags"


def _parser(purpose: str) -> Parser:
    """Return the parser of the flags that ``a run``, ``a plan`` or another purpose has."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=existing_folder)
    if purpose not in ("a run", "a plan"):
        return parser
    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument("--multirun", "-m", action="store_true")
    if purpose == "a run":
        exclusive.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        exclusive.add_argument("--info", "-i", nargs="?", const="all")
        exclusive.add_argument("--shell-completion", "-sc", choices=_COMPLETIONS)
        exclusive.add_argument("--hydra-help", action="store_true")
        parser.add_argument("--package", "-p")
        parser.add_argument("--resolve", action="store_true")
        parser.add_argument("--help", "-h", action="store_true")
    return parser


def composed(arguments: Arguments) -> Request:
    """Return the request of the arguments, composed and validated."""
    with signals.deferred():
        return request(
            arguments.overrides,
            multirun=arguments.multirun,
            config_dir=arguments.config_dir,
            after_each=signals.raise_if_noted,
        )


def checked(arguments: Arguments) -> Request:
    """Return the request of a run or a sweep, checked as far as that goes without torch."""
    request = composed(arguments)
    if not joins():  # else the first rank may have begun the record
        problem = _sweep_problem(request) if request.sweep else _run_problem(request)
        if problem is not None:
            raise RequestError([problem])
    return request


def _run_problem(request: Request) -> Problem | None:
    """Return why a run must not be written to its folder."""
    folder = request.folder
    message = obstacle(folder) or earlier_run(folder)
    if message:
        message = _how_to_go_on(request) or message
    return Problem("hydra.run.dir", str(folder), message) if message else None


def _how_to_go_on(request: Request) -> str | None:
    """Return how to continue a finished run for longer, if that is what a request asks for."""
    folder = request.folder
    [job] = request.jobs
    status = read_object(folder / files.STATUS)
    try:
        recorded = read_yaml(folder / files.CONFIG)
        before = recorded["train"]["max_duration"]
    except (Refusal, KeyError, TypeError):
        return None
    duration = str(job.config.train.max_duration)
    differing = differences(recorded, job.plain)
    if str(before)[-2:] != duration[-2:]:  # in another unit, which may be longer
        differing.pop("train.max_duration", None)
    if status.get("state") != "finished" or duration == before or differing:
        return None
    if not any((folder / files.CHECKPOINTS).glob(f"step_*/{files.MANIFEST}")):
        return (
            f"holds a run that finished after {before}, and no checkpoint to continue from; train "
            "anew in another folder, with checkpoint.interval=1ep, say"
        )
    targets = [text for text in job.overrides if "_target_" in text]
    place = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    words = [f"resume={place}", f"train.max_duration={duration}", *masked_words(targets)]
    command = f"python -m runner {shlex.join(words)}"
    return f"holds a run that finished after {before}; to go on in a new folder: {command}"


def _sweep_problem(request: Request) -> Problem | None:
    """Return why a sweep must not be written to its folder, or cannot be launched here."""
    message = obstacle(request.folder)
    if message:
        return Problem("hydra.sweep.dir", str(request.folder), message)
    hashes = [] if request.is_search else [job.hash for job in request.jobs]
    message = earlier_sweep(request.folder, request.identity, hashes)
    if message:
        return Problem("sweep.name", request.sweep, message)
    if request.place == "elsewhere" and not shutil.which("sbatch"):
        message = "there is no sbatch here: run this on a machine that submits jobs to Slurm"
        return Problem("hydra/launcher", "submitit_slurm", message)
    return None
