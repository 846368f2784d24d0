"""Callbacks that tests name by ``_target_``."""

import json
from pathlib import Path


class Notes:
    """Writes the names of its calls to a file; fails in the method ``fails_in``."""

    def __init__(self, file: str, fails_in: str = "", end_at: int = 0) -> None:
        self.file, self.fails_in, self.end_at = Path(file), fails_in, end_at

    def _note(self, name, trainer, values):
        if name == self.fails_in:
            raise KeyError("planted")
        step = trainer.state.progress.step
        with self.file.open("a") as file:
            print(json.dumps([name, step, *values]), file=file)

    def on_start(self, trainer):
        self._note("on_start", trainer, [])

    def on_step(self, trainer, metrics):
        self._note("on_step", trainer, [metrics.step, float(metrics.decision.norm)])
        if metrics.step == self.end_at:
            trainer.end_early("planted end")

    def on_evaluate(self, trainer, metrics):
        self._note("on_evaluate", trainer, [metrics["eval/loss"]])

    def on_end(self, trainer, summary):
        self._note("on_end", trainer, [summary["steps"]])
