"""Names of the files and folders of a run and of a sweep.

A run has its own folder; a sweep has one with a numbered folder for each of its runs.
"""

from __future__ import annotations

HYDRA = ".hydra"
"""What Hydra composed the run from."""
OVERRIDES = f"{HYDRA}/overrides.yaml"
CONFIG = "config.yaml"
"""Resolved configuration."""
STATUS = "status.json"
"""How the run stands: state, exit code, error, step."""
ROWS = "metrics.jsonl"
SUMMARY = "summary.json"
PAGE = "report.html"
"""Page of a run or of a sweep."""
LOG = "runner.log"
CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""
FINAL = "final"
"""Checkpoint of a run that holds the weights of its end, and nothing to continue from."""
STATE = "state.pt"
"""State of a training besides its tensors, in a checkpoint."""
MANIFEST = "manifest.json"
"""What a checkpoint holds: sizes and checksums of its files. It is written last."""
WANDB = "wandb"
"""Folder that wandb writes its record to."""

SWEEP = "sweep.json"
"""What a sweep was asked for, and how each of its runs stands."""
MULTIRUN = "multirun.yaml"
"""What Hydra composed the sweep from."""
EARLIER = "earlier"
"""Folder of a sweep that keeps the files of unfinished runs that were started again."""
