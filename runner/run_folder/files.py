"""Names of the files and folders of a run, and of a sweep with numbered folders of runs."""

from __future__ import annotations

HYDRA = ".hydra"  # what Hydra composed the run from
OVERRIDES = f"{HYDRA}/overrides.yaml"
COMPOSED = f"{HYDRA}/hydra.yaml"  # hydra's own part of what it composed
CONFIG = "config.yaml"  # resolved configuration
STATUS = "status.json"  # how the run stands: state, exit code, error, step
ROWS = "metrics.jsonl"
SUMMARY = "summary.json"
PAGE = "report.html"  # page of a run or of a sweep
TABLE_CSV, TABLE_LATEX, TABLE_JSON = "report.csv", "report.tex", "report.json"
LOG = "runner.log"
LOCK = ".run.lock"  # locked by the process that writes to the folder of a run or a sweep
RANKS = ".ranks"  # folder in which each rank of a run that hangs writes where it is
CHECKPOINTS = "checkpoints"  # folder of a run that holds its checkpoints
FINAL = "final"  # checkpoint with the weights of the end of a run, and nothing to continue from
STATE = "state.pt"  # state of a training besides its tensors, in a checkpoint
MANIFEST = "manifest.json"  # sizes and checksums of the files of a checkpoint; written last
TENSORBOARD = "tensorboard"
PROFILE = "profile"  # folder of a run whose steps were profiled
TRACE = "trace.json"
STEPS = "steps.txt"  # where the time of a step goes
WANDB = "wandb"  # folder that wandb writes its record to
SWEEP = "sweep.json"  # what a sweep was asked for, and how each of its runs stands
MULTIRUN = "multirun.yaml"  # what Hydra composed the sweep from
EARLIER = "earlier"  # folder of a sweep with the files of unfinished runs that started again
