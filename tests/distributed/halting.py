"""A clipping mode that halts a run in one step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from runner.clip import ClipMode, Decision, GradStats, Layout, ModeInfo, limit_norm

HALTED = "TESTS_HALTED"
"""Variable with the file that is made when the run halts; it halts once."""


@dataclass
class HaltOnce(ClipMode):
    """Limit the norm, and wait to be killed in one step, before anything of it is applied."""

    info = ModeInfo(stat="‖G‖", note="")
    initial_history = {"steps": 0.0}  # noqa: RUF012

    at: int = 13

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        self.history["steps"] = self.history["steps"] + 1
        halted = Path(os.environ[HALTED])
        first = int(os.environ.get("RANK", 0)) == 0
        if self.history["steps"] == self.at and not halted.exists() and first:
            halted.touch()
            time.sleep(600)
        return limit_norm(stats.norm, self.limit)
