"""Folders of checkpoints: written beside and renamed, with a manifest of checksums."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.config.reading import DamagedFile, opened
from runner.run_folder import files
from runner.run_folder.strict_json import decode_file, encode, number

VERSION = 4  # of the format; a checkpoint of another one is refused
_PREFIX, _PART = "step_", ".part"


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not whole; the message names the file and what is wrong with it."""


def begin(folder: Path, step: int | None) -> Path:
    _tidy(folder)
    name = files.FINAL if step is None else _name(step)
    part = folder / f".{name}{_PART}"
    part.mkdir(parents=True)
    return part


def complete(part: Path, about: dict[str, Any]) -> Path:
    """Write the manifest of a checkpoint whose files are written, and give it its name."""
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


def found(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, newest step first; none where there is no folder."""
    named = [one for one in folder.glob(_PREFIX + "[0-9]" * 9) if one.is_dir()]
    return sorted(named, key=lambda one: one.name, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, whose files may still be damaged."""
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
    version, listed = manifest.get("version"), manifest.get("files")
    if not isinstance(version, int) or not isinstance(listed, dict):
        raise DamagedCheckpoint(f"{path} is no manifest of a checkpoint")
    for key, kind in {"step": int, "metrics": dict, "tied": dict}.items():
        if not isinstance(manifest.get(key), kind | None):
            raise DamagedCheckpoint(f"{path} is damaged: its {key} is none")
    if version != VERSION:
        raise DamagedCheckpoint(
            f"{checkpoint} was written by another version of clip-runner: its format is {version}, "
            f"and this version reads format {VERSION}"
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
            entry = _entry(path)
        except DamagedFile as error:
            raise DamagedCheckpoint(str(error)) from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
        if not isinstance(wanted, dict) or wanted.get("sha256") != entry["sha256"]:
            raise DamagedCheckpoint(f"{path} is damaged: its sha256 is not that of the manifest")
    return manifest


def whole(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the checkpoints of a folder that are whole, newest first, each with its manifest."""
    for checkpoint in found(folder):
        with suppress(DamagedCheckpoint):
            yield checkpoint, require_whole(checkpoint)


class NoCheckpoint(ValueError):
    """A run has no checkpoint, or not the one that is asked for."""


def choose(
    run: Path, which: str | None, objective: str, maximizes: bool
) -> tuple[Path, dict[str, Any]]:
    """Find a whole checkpoint: final, last, best or a step; by default final, or else last."""
    saved = run / files.CHECKPOINTS
    listed = found(saved)
    named = {str(step_of(one)): one for one in reversed(listed)}
    if (saved / files.FINAL).is_dir():
        named[files.FINAL] = saved / files.FINAL
    if which == "last" or (which is None and files.FINAL not in named):
        chosen = next((one for one, _ in whole(saved)), listed[0] if listed else None)
    elif which == "best":
        chosen = best_of(listed, objective, maximizes)
    else:
        chosen = named.get((which or files.FINAL).lstrip("0"))
    if chosen is None:
        of = f" with {objective}" if which == "best" else ""
        there = f"has no checkpoint {which}{of}  (there are: {', '.join(named)})"
        raise NoCheckpoint(there if named else f"holds no checkpoint ({files.CHECKPOINTS}/)")
    return chosen, require_whole(chosen)


def prune(
    folder: Path, keep: int, best: str | None, maximizes: bool, newest: int | None = None
) -> None:
    """Remove all but the newest checkpoints and the best one, and those after step ``newest``."""
    listed = found(folder)
    current = [one for one in listed if newest is None or one.name <= _name(newest)]
    kept = set(current[:keep])
    if best is not None and (leader := best_of(current, best, maximizes)):
        kept.add(leader)
    for one in set(listed) - kept:
        with suppress(OSError):
            _remove(one)
    _tidy(folder)


def best_of(checkpoints: list[Path], metric: str, maximizes: bool) -> Path | None:
    """Return the checkpoint with the best value; of several, the first one after the evaluation."""
    scored = []
    for one in checkpoints:
        with suppress(DamagedCheckpoint):
            value = number((manifest_of(one).get("metrics") or {}).get(metric))
            if value is not None and math.isfinite(value):
                scored.append((-value if maximizes else value, one))
    return min(scored)[1] if scored else None


def _tidy(folder: Path) -> None:
    for one in folder.glob(f".*{_PART}"):
        shutil.rmtree(one, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. Its name goes at once: what a kill leaves of it is taken for none."""
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
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
