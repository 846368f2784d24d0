"""Replace a file as a whole: a reader sees the old content or the new one, never a part of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.config import disk


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``, which is renamed to ``path`` at the end."""
    writer = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk.described(error, path, path.name, len(text)) from error


def reserve(path: Path, size: int) -> None:
    """Reserve bytes of the disk, with which ``path`` can be replaced once the disk is full."""
    with _reserve_of(path).open("wb") as file:
        file.write(os.urandom(size))  # zeros would be left out by some file systems


def fill_reserve(path: Path, text: str) -> bool:
    """Replace ``path`` by ``text``, in the space that was reserved; return whether that worked."""
    try:
        with _reserve_of(path).open("r+b") as file:
            file.write(text.encode())
            file.truncate()
        _reserve_of(path).replace(path)
    except OSError:
        return False
    return True


def remove_reserve(path: Path) -> None:
    """Remove what :func:`reserve` made, if it is still there."""
    _reserve_of(path).unlink(missing_ok=True)


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")
