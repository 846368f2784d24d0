"""``python -m runner report FOLDER [--open]``: write the page of a run or a sweep."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from runner.cli import WRONG_REQUEST
from runner.report import NoRunError, write
from runner.run_folder import files


def main(words: Sequence[str] | None = None) -> int:
    """Write the page and print where it lies.

    Returns:
        0; 2 where the folder is missing, holds no run, or cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m runner report",
        description=f"Write {files.PAGE}, one self-contained page, for a run or for a sweep.",
    )
    parser.add_argument("folder", type=Path, help="folder of a run, or of a sweep")
    parser.add_argument("--open", action="store_true", help="show it in the browser too")
    asked = parser.parse_args(words)
    try:
        page = write(asked.folder)
    except NoRunError as error:
        print(error, file=sys.stderr)
        return WRONG_REQUEST
    except OSError as error:
        print(f"{asked.folder}: the page cannot be written: {error}", file=sys.stderr)
        return WRONG_REQUEST
    print(page)
    if asked.open and not webbrowser.open(page.as_uri()):
        print("no browser here; open the file above in one", file=sys.stderr)
    return 0
