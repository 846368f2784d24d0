"""What stands in other people's loops needs torch and pydantic alone, from torch 2.10 on."""

import json
import os
import re
import shutil
import sys
import tomllib

import pytest

from tests.process import ROOT
from tests.test_wheel import ended

VERSIONS = ["2.10.0", "2.12.0", "2.14.1"]


def block_of_readme(start):
    """The lines of README's block of Python that has this text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [block] = [block for block in blocks if start in block]
    return block


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_library_runs_beside_torch_and_pydantic_alone(version, tmp_path):
    """Installs torch from the configured package index, which takes minutes and 6 GB."""
    home = tmp_path / "venv"
    ended([sys.executable, "-m", "venv", str(home)])
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RUNNER_OUTPUTS")}

    def run(*words):
        return ended([str(home / "bin" / "python"), *words], 3000, cwd=tmp_path, env=kept)

    try:
        run("-m", "pip", "install", "-q", f"torch=={version}", "pydantic>=2.11,<3")
        run("-m", "pip", "install", "-q", "--no-deps", str(ROOT))
        script = str(ROOT / "tests" / "library_alone.py")
        blocks = block_of_readme("GradientMonitor(model"), block_of_readme("check_clipping(model")
        printed = run("-W", "ignore", script, *blocks)
        assert printed.count("check_clipping: right") == 3
        assert version in printed
        for kind in ("ddp", "fsdp"):
            [line] = (tmp_path / "runs" / kind / "metrics.jsonl").read_text().splitlines()
            assert json.loads(line)["clip/threshold"] == 0.25
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        run("-m", "pip", "install", "-q", *extras["optional-dependencies"]["report"])
        run("-m", "runner", "report", "runs")
        assert "<html" in (tmp_path / "runs" / "report.html").read_text()
    finally:
        shutil.rmtree(home)
