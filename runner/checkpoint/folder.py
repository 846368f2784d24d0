"""Folders of checkpoints: written beside and renamed, with a manifest of sizes and checksums.

A checkpoint is a folder ``step_000000037``. Its manifest is written last, and then the folder gets
its name, so that a run that is killed while it saves leaves the checkpoints before it as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.run_folder import files
from runner.run_folder.strict_json import decode, encode, number

VERSION = 1
"""Version of the format; a checkpoint of a later one is refused."""

_PREFIX, _PART, _FORMER = "step_", ".part", ".former"


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not whole; the message names the file and what is wrong with it."""


def begin(folder: Path, step: int | None) -> Path:
    """Make the folder that a checkpoint is written to, until it is whole."""
    _tidy(folder)
    name = files.FINAL if step is None else _name(step)
    part = folder / f".{name}{_PART}"
    part.mkdir(parents=True)
    return part


def complete(part: Path, about: dict[str, Any]) -> Path:
    """Write the manifest of a checkpoint and give the folder its name."""
    content = {file.name: _entry(file) for file in sorted(part.iterdir())}
    manifest = part / files.MANIFEST
    manifest.write_text(encode({"version": VERSION, **about, "files": content}, indent=2) + "\n")
    for path in (*part.iterdir(), part):
        _flush(path)
    final = part.with_name(part.name.removeprefix(".").removesuffix(_PART))
    former = part
    if not final.exists():
        part.rename(final)
    elif not _exchange(part, final):
        former = final.with_name(f".{final.name}{_FORMER}{_PART}")
        final.rename(former)
        part.rename(final)
    _flush(final.parent)
    shutil.rmtree(former, ignore_errors=True)
    return final


def found(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, newest step first; none where there is no folder."""
    if not folder.is_dir():
        return []
    named = [one for one in folder.glob(f"{_PREFIX}*") if one.is_dir()]
    named = [one for one in named if one.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(named, key=lambda one: one.name, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint."""
    path = checkpoint / files.MANIFEST
    try:
        manifest = decode(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(
            f"{checkpoint} is no checkpoint: {path.name}: {error.strerror}"
        ) from None
    except ValueError:
        raise DamagedCheckpoint(f"{path} is damaged: it is no JSON object") from None
    version, listed = manifest.get("version"), manifest.get("files")
    if not isinstance(version, int) or not isinstance(listed, dict):
        raise DamagedCheckpoint(f"{path} is no manifest of a checkpoint")
    if version > VERSION:
        raise DamagedCheckpoint(
            f"{checkpoint} was written by a later version of clip-runner: format {version}, "
            f"but this version reads formats up to {VERSION}"
        )
    for name in listed:
        if name in ("", ".", "..") or Path(name).name != name:
            raise DamagedCheckpoint(f"{path} names {name!r}, which is no file of the checkpoint")
    others = {one.name for one in checkpoint.glob("*.safetensors")} - set(listed)
    if others:  # they would be read with those that are listed
        raise DamagedCheckpoint(f"{checkpoint} holds {min(others)}, which its manifest does not")
    return manifest


def require_whole(checkpoint: Path) -> dict[str, Any]:
    """Check the files of a checkpoint against its manifest, and return the manifest."""
    manifest = manifest_of(checkpoint)
    for name, wanted in manifest["files"].items():
        path = checkpoint / name
        try:
            held = _entry(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
        for what, value in held.items():
            if not isinstance(wanted, dict) or wanted.get(what) != value:
                raise DamagedCheckpoint(
                    f"{path} is damaged: its {what} is not that of the manifest"
                )
    return manifest


def whole(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the checkpoints of a folder that are whole, newest first, each with its manifest."""
    for checkpoint in found(folder):
        try:
            yield checkpoint, require_whole(checkpoint)
        except DamagedCheckpoint:
            continue


def prune(
    folder: Path, keep: int, best: str | None, maximizes: bool, newest: int | None = None
) -> None:
    """Remove all but the newest checkpoints, and what unfinished writes have left."""
    listed = found(folder)
    current = [one for one in listed if newest is None or one.name <= _name(newest)]
    kept = set(current[:keep])
    if best is not None and (leader := best_of(current, best, maximizes)):
        kept.add(leader)
    for one in set(listed) - kept:
        # Its name goes at once: what a kill leaves of it is not taken for a checkpoint.
        with suppress(OSError):
            one.rename(one.with_name(f".{one.name}.old{_PART}"))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Remove what unfinished writes have left, and name a checkpoint that was being replaced."""
    for one in folder.glob(f".*{_PART}"):
        name = one.name.removeprefix(".").removesuffix(_PART)
        former = one.with_name(name.removesuffix(_FORMER))
        if name.endswith(_FORMER) and not former.exists():
            one.rename(former)
        else:
            shutil.rmtree(one, ignore_errors=True)


def best_of(checkpoints: list[Path], metric: str, maximizes: bool) -> Path | None:
    """Return the checkpoint with the best value; of several, the first one after the evaluation."""
    scored = []
    for one in sorted(checkpoints):
        try:
            metrics = manifest_of(one).get("metrics")
        except DamagedCheckpoint:
            continue
        value = number(metrics.get(metric)) if isinstance(metrics, dict) else None
        if value is not None and math.isfinite(value):
            scored.append((-value if maximizes else value, one))
    return min(scored)[1] if scored else None


def _name(step: int) -> str:
    return f"{_PREFIX}{step:09d}"


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {
            "size": os.fstat(content.fileno()).st_size,
            "sha256": hashlib.file_digest(content, "sha256").hexdigest(),
        }


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at one moment; return False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux; not every network disk
    here = -100  # AT_FDCWD: relative paths are those of this process
    names = os.fsencode(one), os.fsencode(other)
    swap = ctypes.c_uint(2)  # RENAME_EXCHANGE
    return rename is not None and rename(here, names[0], here, names[1], swap) == 0


def _flush(path: Path) -> None:
    """Write a file, or the entries of a folder, from memory to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
