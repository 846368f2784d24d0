"""``python -m runner report FOLDER``: write the page of a run or a sweep, and its table."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.cli import WRONG_REQUEST, command_parser
from runner.config.notation import first_few
from runner.config.problem import NOTHING, Problem, RequestError, did_you_mean
from runner.report import FORMATS, NoRunError, read
from runner.report.findings import find
from runner.report.page import write_page
from runner.run_folder import files
from runner.run_folder.strict_json import write_text

_BASELINE = "report.baseline"


def main(words: Sequence[str]) -> int:
    """Write the page, and the files that are asked for, and print where they lie."""
    parser = command_parser("report", f"Write {files.PAGE}, one page, for a run or for a sweep.")
    add = parser.add_argument
    add("folder", type=Path, help="folder of a run, or of a sweep")
    about = "compare the other settings with this one: its name in the table, or one of its runs"
    add("overrides", nargs="*", metavar=f"{_BASELINE}=NAME", help=about)
    add("--open", action="store_true", help="show it in the browser too")
    for kind, (name, _) in FORMATS.items():
        add(f"--{kind}", action="store_true", help=f"also write {name}")
    asked = parser.parse_intermixed_args(words)
    baseline = None
    for word in asked.overrides:
        key, _, baseline = word.partition("=")
        if key != _BASELINE or not baseline:
            message = f"the page takes {_BASELINE}=NAME alone{did_you_mean(key, [_BASELINE])}"
            raise RequestError([Problem(key, baseline or NOTHING, message)])
    try:
        sweep = replace(read(asked.folder), baseline=baseline)
    except NoRunError as error:
        print(error, file=sys.stderr)
        return WRONG_REQUEST
    found = find(sweep)
    if baseline and found.unknown is not None:
        labels = [group.label for group in found.groups]
        message = f"names no setting of {sweep.name}{did_you_mean(baseline, labels)}"
        raise RequestError(
            [Problem(_BASELINE, baseline, f"{message}  (settings: {first_few(labels, 8)})")]
        )
    page = write_page(sweep)
    print(page)
    for name, text in (one for kind, one in FORMATS.items() if getattr(asked, kind)):
        write_text(sweep.folder / name, text(found).encode("utf-8", "replace").decode())
        print(sweep.folder / name)
    if asked.open and not webbrowser.open(page.as_uri()):
        print("no browser here; open the file above in one", file=sys.stderr)
    return 0
