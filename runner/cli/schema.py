"""``python -m runner schema [FILE]``: write the JSON Schema of the YAML files, for editors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from runner.config.problem import Problem, RequestError
from runner.run_folder.atomic import write_text

DESCRIPTION = """\
Write the JSON Schema of conf/ and recipes/. An editor with a YAML language server completes and
checks a file whose header names it:

  # yaml-language-server: $schema=conf/schema.json               a configuration or a recipe
  # yaml-language-server: $schema=conf/schema.json#/$defs/clip   an option of the group clip"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the schema to a file, or to stdout.

    Raises:
        RequestError: the file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m runner schema",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, help="file to write; stdout by default")
    file = parser.parse_args(argv).file
    from runner.config.json_schema import json_schema

    text = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    if file is None:
        print(text, end="")
        return 0
    try:
        write_text(file, text)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise RequestError([Problem("schema", str(file), message)]) from None
    return 0
