"""Write constraints.txt: what pip resolves pyproject.toml to.

    python tests/pins.py              # keep the pins that are there, add what is missing
    python tests/pins.py --upgrade    # the newest versions that pyproject.toml allows

It asks the package index for names and versions; pip 23.3 or later downloads no archive.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints.txt"
HEADER = """\
# Exact versions of all packages that the tests ran with, on Python 3.11 and Linux. Used by the
# commands of README.md:
#   pip install -e . -c constraints.txt
# Made by python tests/pins.py.
"""


def main(words):
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "-e", ".[dev]"]
    command += [] if "--upgrade" in words else ["-c", str(PINS)]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command += ["--ignore-installed", "--report", report.name]
        subprocess.run(command, check=True, cwd=ROOT)
        installed = json.loads(Path(report.name).read_text())["install"]
    pins = {package["metadata"]["name"]: package["metadata"]["version"] for package in installed}
    del pins["clip-runner"]
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins, key=str.lower)]
    PINS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
