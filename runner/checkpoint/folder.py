"""Folders of checkpoints: written beside and renamed, with a manifest of checksums."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.config.reading import DamagedFile, opened
from runner.run_folder import files
from runner.run_folder.strict_json import decode_file, encode, number

VERSION = 4  # of the format; a checkpoint of another one is refused
_PREFIX = "step_"
_PART = ".part"


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not whole; the message names the file and what is wrong with it."""


def begin(folder: Path, step: int | None) -> Path:
    """Return a new folder for the files of a checkpoint; step None: of the final weights."""
    _tidy(folder)
    name = files.FINAL if step is None else _name(step)
    part = folder / f".{name}{_PART}"
    part.mkdir(parents=True)
    return part


def complete(part: Path, about: dict[str, Any]) -> Path:
    """Write the manifest of a checkpoint whose files are written; return it under its name."""
    content = {file.name: _entry(file) for file in sorted(part.iterdir())}
    manifest = part / files.MANIFEST
    manifest.write_text(encode({"version": VERSION, **about, "files": content}, indent=2) + "\n")
    for path in (*part.iterdir(), part):
        _flush(path)
    final = part.with_name(part.name.removeprefix(".").removesuffix(_PART))
    if final.exists():  # a folder that is not empty cannot be replaced at one moment
        _remove(final)
    part.rename(final)
    _flush(final.parent)
    return final


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, newest step first; none where there is no folder."""
    if not os.path.isdir(folder):
        return []
    folders = [path for path in folder.glob(_PREFIX + "[0-9]" * 9) if path.is_dir()]
    return sorted(folders, key=lambda path: path.name, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step at which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, whose files may still be damaged."""
    path = checkpoint / files.MANIFEST
    try:
        manifest = decode_file(path)
    except DamagedFile as error:
        raise DamagedCheckpoint(str(error)) from None
    except OSError as error:
        message = f"{checkpoint} is no checkpoint: {path.name}: {error.strerror}"
        raise DamagedCheckpoint(message) from None
    except ValueError:
        raise DamagedCheckpoint(f"{path} is damaged: it is no JSON object") from None
    _require_format(checkpoint, manifest)
    _require_listed(checkpoint, manifest["files"])
    return manifest


def _require_format(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest whose values have wrong types, or that another version has written."""
    path = checkpoint / files.MANIFEST
    version = manifest.get("version")
    if not isinstance(version, int) or not isinstance(manifest.get("files"), dict):
        raise DamagedCheckpoint(f"{path} is no manifest of a checkpoint")
    for key, kind in {"step": int, "metrics": dict, "tied": dict}.items():
        if not isinstance(manifest.get(key), kind | None):
            raise DamagedCheckpoint(f"{path} is damaged: its {key} is none")
    if version != VERSION:
        raise DamagedCheckpoint(
            f"{checkpoint} was written by another version of clip-runner: its format is {version}, "
            f"and this version reads format {VERSION}"
        )


def _require_listed(checkpoint: Path, names: Collection[str]) -> None:
    """Refuse a manifest that names files elsewhere, or not all tensors of the checkpoint."""
    path = checkpoint / files.MANIFEST
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise DamagedCheckpoint(f"{path} names {name!r}, which is no file of the checkpoint")
    unlisted = {file.name for file in checkpoint.glob("*.safetensors")} - set(names)
    if unlisted:  # they would be read with the listed files
        raise DamagedCheckpoint(f"{checkpoint} holds {min(unlisted)}, which its manifest does not")


def require_files(checkpoint: Path) -> None:
    """Check that the files of a checkpoint are there; :func:`require_whole` reads them."""
    for name in manifest_of(checkpoint)["files"]:
        path = checkpoint / name
        try:
            with opened(path):
                pass
        except DamagedFile as error:
            raise DamagedCheckpoint(str(error)) from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None


def require_whole(checkpoint: Path) -> dict[str, Any]:
    """Check the files of a checkpoint against its manifest, and return the manifest."""
    manifest = manifest_of(checkpoint)
    for name, recorded in manifest["files"].items():
        path = checkpoint / name
        try:
            entry = _entry(path)
        except DamagedFile as error:
            raise DamagedCheckpoint(str(error)) from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
        if not isinstance(recorded, dict) or recorded.get("sha256") != entry["sha256"]:
            raise DamagedCheckpoint(f"{path} is damaged: its sha256 is not that of the manifest")
    return manifest


def whole(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the checkpoints of a folder that are whole, newest first, each with its manifest."""
    for checkpoint in checkpoints_in(folder):
        with suppress(DamagedCheckpoint):
            yield checkpoint, require_whole(checkpoint)


class NoCheckpoint(ValueError):
    """A run has no checkpoint, or not the chosen one."""


def choose(
    run: Path, which: str | None, objective: str, maximizes: bool
) -> tuple[Path, dict[str, Any]]:
    """Return a whole checkpoint with its manifest: final, last, best or a step.

    By default it is the final one, or else the last.
    """
    folder = run / files.CHECKPOINTS
    checkpoints = checkpoints_in(folder)
    by_name = {str(step_of(checkpoint)): checkpoint for checkpoint in reversed(checkpoints)}
    if os.path.isdir(folder / files.FINAL):
        by_name[files.FINAL] = folder / files.FINAL
    if which is None:
        which = files.FINAL if files.FINAL in by_name else "last"
    if which == "last":
        chosen = _last(folder)
    elif which == "best":
        chosen = best_of(checkpoints, objective, maximizes)
    else:
        chosen = by_name.get((which or files.FINAL).lstrip("0"))
    if chosen is not None:
        return chosen, require_whole(chosen)
    if not by_name:
        missing = "" if os.path.isdir(run) else "; there is no such folder"
        raise NoCheckpoint(f"holds no checkpoint ({files.CHECKPOINTS}/){missing}")
    metric = f" with {objective}" if which == "best" else ""
    why = _why_gone(int(which), checkpoints) if which.isdecimal() else ""
    raise NoCheckpoint(f"has no checkpoint {which}{metric}{why}  (there are: {', '.join(by_name)})")


def _why_gone(step: int, checkpoints: Sequence[Path]) -> str:
    """Return why a run has no checkpoint of a step, as far as its manifests tell."""
    newest = next(iter(checkpoints), None)
    if newest is None:
        return ""
    if step > step_of(newest):
        return f": its newest is that of step {step_of(newest)}"
    settings: Any = {}
    with suppress(DamagedCheckpoint):
        settings = (manifest_of(newest).get("config") or {}).get("checkpoint") or {}
    keep = settings.get("keep")
    interval = re.fullmatch(r"(\d+)ba", str(settings.get("interval")))
    if interval and step % int(interval[1]) == 0:
        return f": checkpoint.keep={keep} has deleted it"
    if interval:
        return f": checkpoint.interval={interval[0]} saves none at this step"
    return f": none was saved at this step, or checkpoint.keep={keep} has deleted it"


def _last(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole, or else the newest; None if there is none."""
    for checkpoint, _ in whole(folder):
        return checkpoint
    return next(iter(checkpoints_in(folder)), None)


def prune(
    folder: Path, keep: int, best: str | None, maximizes: bool, newest: int | None = None
) -> None:
    """Remove all but the newest checkpoints and the best one, and those after step ``newest``."""
    checkpoints = checkpoints_in(folder)
    current = checkpoints
    if newest is not None:
        current = [path for path in checkpoints if path.name <= _name(newest)]
    kept = set(current[:keep])
    leader = None if best is None else best_of(current, best, maximizes)
    if leader is not None:
        kept.add(leader)
    for checkpoint in set(checkpoints) - kept:
        with suppress(OSError):
            _remove(checkpoint)
    _tidy(folder)


def best_of(checkpoints: list[Path], metric: str, maximizes: bool) -> Path | None:
    """Return the checkpoint with the best value; of several, the first one after the evaluation."""
    scored = []
    for checkpoint in checkpoints:
        with suppress(DamagedCheckpoint):
            metrics = manifest_of(checkpoint).get("metrics") or {}
            value = number(metrics.get(metric))
            if value is not None and math.isfinite(value):
                scored.append((-value if maximizes else value, checkpoint))
    return min(scored)[1] if scored else None


def _tidy(folder: Path) -> None:
    """Remove what interrupted writes and removals have left."""
    for part in folder.glob(f".*{_PART}"):
        shutil.rmtree(part, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It loses its name at once: a kill leaves no half of a checkpoint."""
    old = checkpoint.with_name(f".{checkpoint.name}.old{_PART}")
    checkpoint.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _name(step: int) -> str:
    return f"{_PREFIX}{step:09d}"


def _entry(file: Path) -> dict[str, str]:
    with opened(file) as content:
        return {"sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    """Write a file, or the entries of a folder, from memory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
