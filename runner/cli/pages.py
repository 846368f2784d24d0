"""``python -m runner report``, ``dashboard``, ``export`` and ``new``: write pages and files."""

import keyword
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runner.cli import checkpoint_parser, choose_checkpoint, command_parser
from runner.config.folders import find, options, read_yaml
from runner.config.notation import first_few, plural
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean, near_name
from runner.launch.failure import Failure
from runner.request.recipes import files_of
from runner.run_folder.strict_json import obstacle, write_text
from runner.telemetry.sinks.console import print_line

TEMPLATE = Path(__file__).parent / "template"
"""The files to write, with ``NAME`` for the name of the folder, as package data."""

_BASELINE = "report.baseline"
_SECONDS = 20.0  # seconds after which the process that asks wandb's server is killed


def report(argv: Sequence[str]) -> int:
    """Write report.html, one page, for a run or for a sweep."""
    from runner.report import FORMATS, NoRunError, findings, read
    from runner.report.page import write_page

    parser = command_parser(report)
    add = parser.add_argument
    add("folder", type=Path, help="folder of a run, or of a sweep")
    about = "compare the other settings with this one: its name in the table, or one of its runs"
    add("baseline", nargs="?", type=_baseline, metavar=f"{_BASELINE}=NAME", help=about)
    for kind, (name, _) in FORMATS.items():
        add(f"--{kind}", action="store_true", help=f"also write {name}")
    arguments = parser.parse_intermixed_args(argv)
    baseline = arguments.baseline
    try:
        sweep = replace(read(arguments.folder), baseline=baseline)
    except NoRunError as error:
        raise RequestError([Problem("FOLDER", NOTHING, str(error))]) from None
    results = findings.find(sweep)
    if baseline and results.unknown is not None:
        labels = [setting.label for setting in results.settings]
        near = did_you_mean(baseline, labels)
        message = f"names no setting of {sweep.name}{near}  (settings: {first_few(labels, 8)})"
        raise RequestError([Problem(_BASELINE, baseline, message, near_name(baseline, labels))])
    print(write_page(sweep))
    for kind, (name, text_of) in FORMATS.items():
        if getattr(arguments, kind):
            text = text_of(results).encode("utf-8", "replace").decode()
            write_text(sweep.folder / name, text)
            print(sweep.folder / name)
    return 0


def _baseline(argument: str) -> str:
    key, _, name = argument.partition("=")
    if key != _BASELINE or not name:
        message = f"the page takes {_BASELINE}=NAME alone{did_you_mean(key, [_BASELINE])}"
        suggestion = near_name(key, [_BASELINE])
        raise RequestError([Problem(key, name or NOTHING, message, suggestion)])
    return name


def dashboard(argv: Sequence[str]) -> int:
    """Save a wandb workspace with the charts of report.html, and print its URL.

    This needs a wandb server and its API key (wandb login).
    """
    project = str(read_yaml(find("conf") / "tracker_keys.yaml")["project"])
    parser = command_parser(dashboard)
    add = parser.add_argument
    add("--project", default=project, help=f"show the runs of this project ({project})")
    about = "user or team that owns the project (of the API key)"
    add("--entity", default=os.environ.get("WANDB_ENTITY", ""), help=about)
    add("--group", default="", help="show only this group: the name of a sweep")
    add("--name", default="", help="name of the workspace (Clipping, and the group)")
    arguments = parser.parse_args(argv)
    if find_spec("wandb_workspaces") is None:
        message = 'needs wandb-workspaces: pip install -e ".[dashboard]" -c constraints.txt'
        raise RequestError([Problem("dashboard", NOTHING, message)])
    if os.environ.get("WANDB_MODE", "online") != "online":
        raise Failure("the workspace was not saved: wandb is told to be offline (WANDB_MODE)")
    # A process of its own asks the server: wandb's client waits for minutes, and ends with it.
    command = [sys.executable, "-W", "ignore", "-c"]
    command += ["from runner.telemetry.sinks.dashboard import main; main()"]
    command += [arguments.project, arguments.entity, arguments.group, arguments.name]
    # No reports to wandb's own servers, where nothing else is sent either; 6 seconds.
    quick = {"WANDB_ERROR_REPORTING": "false", "WANDB_HTTP_TIMEOUT": "6"}
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        process = subprocess.run(command, env=os.environ | quick, timeout=_SECONDS, **pipes)
    except subprocess.TimeoutExpired:
        raise Failure(f"the workspace was not saved: no answer in {_SECONDS:g} seconds") from None
    if process.returncode:
        error = process.stderr.strip().rpartition("\n")[2]
        raise Failure(f"the workspace was not saved: {error}")
    url = process.stdout.strip().rpartition("\n")[2]
    print_line(f"workspace saved: {url}")
    return 0


def export(argv: Sequence[str]) -> int:
    """Write the weights of a run as one file for a plain model.

    It has the state dict of the whole model, whatever plugin trained it, under the names of the
    plain model. `model.load_state_dict(safetensors.torch.load_file(FILE))` loads it, or
    `torch.load(FILE)` if FILE ends in .pt, .pth or .bin.

    Exit codes: 0 written   1 the checkpoint is damaged, or the file cannot be written
    2 there is no such checkpoint, or the file exists
    """
    parser = checkpoint_parser(export)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="file to write (RUN/model.safetensors)")
    add("--force", action="store_true", help="replace FILE if it exists")
    arguments = parser.parse_args(argv)
    run = arguments.run
    file = arguments.output or run / "model.safetensors"
    if not file.parent.is_dir() or file.is_dir():
        raise RequestError([Problem("--output", str(file), "must name a file in a folder")])
    if file.exists() and not arguments.force:
        raise RequestError([Problem("--output", str(file), "exists; --force replaces it")])
    checkpoint, manifest = choose_checkpoint(run, arguments.checkpoint)  # before torch is imported
    from runner.checkpoint.content import whole_model, write_model

    model = whole_model(checkpoint, manifest)
    about = {"run": run.name}
    for name, key in (("step", "step"), ("config", "config_hash")):
        if manifest.get(key) is not None:
            about[name] = str(manifest[key])
    form = "torch" if file.suffix in (".pt", ".pth", ".bin") else "safetensors"
    try:
        write_model(model, file, form, about)
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    size = f"{file.stat().st_size / 1e6:,.1f} MB"
    step = f", step {about['step']}" if "step" in about else ""
    print_line(f"{plural(len(model), 'tensor')}, {size}{step}, from {checkpoint}\n{file}")
    return 0


def new(argv: Sequence[str]) -> int:
    """Write the folder NAME with a model and a data set of your own to edit.

    Their code is in NAME.py, the options model=NAME and data=NAME and the recipe NAME in conf, and
    a test beside it. It trains as it is:

      python -m runner new demo
      cd demo
      python -m runner --config-dir conf recipe=demo
      python -m pytest
    """
    parser = command_parser(new)
    parser.add_argument("name", metavar="NAME", help="folder, module and options to write")
    name = parser.parse_args(argv).name
    folder = Path(name).absolute()
    taken = [*options("model"), *options("data"), *files_of(), "none", "null", "true", "false"]
    message = obstacle(folder)
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        message = "must be a Python identifier in ASCII, such as my_model"
    elif name.lower() in taken:
        message = "is an option or a recipe already; choose another name"
    elif os.path.lexists(name) or find_spec(name) is not None:
        message = "exists already, or is a module that Python finds; choose another name"
    if message:
        raise RequestError([Problem("NAME", name, message)])
    for source in sorted(TEMPLATE.rglob("*.txt")):
        file = str(source.relative_to(TEMPLATE)).removesuffix(".txt").replace("NAME", name)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text("utf-8").replace("NAME", name), encoding="utf-8")
        print_line(f"{name}/{file}")
    print_line(f"\ncd {name}\npython -m runner --config-dir conf recipe={name}\npython -m pytest")
    return 0
