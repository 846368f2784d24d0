"""Whether something else lies where a run or a sweep writes its files and folders."""

from __future__ import annotations

from pathlib import Path

from runner.run_folder import files

_OF_RUN = (
    *(files.CONFIG, files.STATUS, files.ROWS, files.SUMMARY, files.PAGE, files.LOG),
    *(files.LOCK, files.HOLDER),
)
_OF_SWEEP = (files.SWEEP, files.MULTIRUN, files.PAGE, ".sweep.lock", f".{files.SWEEP}.lock")
_FOLDERS_OF_RUN = (files.HYDRA, files.CHECKPOINTS, files.WANDB)
_FOLDERS_OF_SWEEP = (files.EARLIER,)


def misplaced(folder: Path, sweep: bool) -> str | None:
    """Return what lies in the way of a run or a sweep in ``folder``, which may not exist."""
    written, made = (_OF_SWEEP, _FOLDERS_OF_SWEEP) if sweep else (_OF_RUN, _FOLDERS_OF_RUN)
    for name in written:
        if (folder / name).exists() and not (folder / name).is_file():
            return f"{folder / name} is not a file, and one is written there; remove it"
    for name in made:
        if (folder / name).exists() and not (folder / name).is_dir():
            return f"{folder / name} is not a folder, and one is made there; remove it"
    return None
