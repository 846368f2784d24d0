"""Write constraints.txt and requirements-hashed.txt: what pip resolves pyproject.toml to.

    python tests/pins.py              # keep the pins that are there, add what is missing
    python tests/pins.py --upgrade    # the newest versions that pyproject.toml allows

It asks the package index for names, versions and hashes; pip 23.3 or later downloads no archive.
Hashes are those of the archives for Linux on x86_64, for each Python of `PYTHONS`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]

PINS, HASHED = ROOT / "constraints.txt", ROOT / "requirements-hashed.txt"
PINS_HEADER = """\
# Exact versions of all packages that the tests ran with, on Python 3.11 and Linux. Used by the
# commands of README.md:
#   pip install -e . -c constraints.txt
# Made by python tests/pins.py.
"""
HASHED_HEADER = """\
# The packages of constraints.txt, those of all extras too, with the hashes of their archives for
# Linux on x86_64 and Python 3.11, 3.12 and 3.13. For installations that check hashes:
#   pip install --require-hashes -r requirements-hashed.txt && pip install --no-deps -e .
# Made by python tests/pins.py.
"""


def resolved(*options):
    """What pip would install: by name the version and the hashes of the archive."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--report", report.name, *options]
        subprocess.run(command, check=True, cwd=ROOT)
        found = json.loads(Path(report.name).read_text())["install"]
    return {
        each["metadata"]["name"]: (
            each["metadata"]["version"],
            each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256"),
        )
        for each in found
    }


def main(words):
    kept = [] if "--upgrade" in words else ["-c", str(PINS)]
    found = resolved("-e", ".[dev]", *kept)
    found.pop("clip-runner")
    hashes = {name: {sha256} for name, (_, sha256) in found.items()}
    lines = [f"{name}=={found[name][0]}\n" for name in sorted(found, key=str.lower)]
    PINS.write_text(PINS_HEADER + "".join(lines))
    with tempfile.TemporaryDirectory() as target:
        # The one package without a wheel has one archive for all.
        wheels = [line.strip() for line in lines if not line.startswith("antlr4-")]
        where = [word for one in PLATFORMS for word in ("--platform", one)]
        for python in PYTHONS:
            options = ["--no-deps", "--only-binary=:all:", "--target", target, *where]
            for name, (_, sha256) in resolved(
                *options, "--python-version", python, *wheels
            ).items():
                hashes[name].add(sha256)
    entries = []
    for line in lines:
        pin = line.strip()
        entries.append(" \\\n    ".join([pin, *_options(hashes[pin.partition("==")[0]])]) + "\n")
    HASHED.write_text(HASHED_HEADER + "".join(entries))


def _options(hashes):
    return [f"--hash=sha256:{one}" for one in sorted(hashes)]


if __name__ == "__main__":
    main(sys.argv[1:])
