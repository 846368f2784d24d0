"""``python -m runner schema``: print the JSON Schema of the YAML files, for editors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

DESCRIPTION = """\
Print the JSON Schema of configurations and recipes:

  python -m runner schema > conf/schema.json

An editor with a YAML language server completes and checks a file whose header names it:

  # yaml-language-server: $schema=schema.json               a configuration or a recipe
  # yaml-language-server: $schema=schema.json#/$defs/clip   an option of the group clip"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the schema."""
    parser = argparse.ArgumentParser(
        prog="python -m runner schema",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    from runner.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    return 0
