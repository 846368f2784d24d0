"""Tell whether wandb wrote a record to its end: on a full disk its client drops the rest silently.

The file has the framing of LevelDB's log: after 7 bytes come blocks of 32 KiB, of chunks that each
follow 7 bytes of checksum, length and kind. One or more chunks make a message of protobuf.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 2**15
_HEADER = 7
_WHOLE, _FIRST, _LAST = 1, 2, 4

_EXIT = 18
"""Number of the field ``exit`` of wandb's message ``Record``."""


LATE = 3.0
"""Seconds in which wandb's client may write the end of a run after it has said that it is done."""


def has_end(file: Path) -> bool:
    """Return whether the file of a run, ``run-<id>.wandb``, holds the end of the run."""
    try:
        start = max(0, file.stat().st_size // _BLOCK - 1) * _BLOCK
        with file.open("rb") as stream:
            stream.seek(start)
            tail = stream.read()
    except OSError:
        return False
    message, place = b"", 0 if start else _HEADER
    while place + _HEADER <= len(tail):
        length, kind = struct.unpack_from("<HB", tail, place + 4)
        place += _HEADER
        chunk = tail[place : place + length]
        if len(chunk) < length:
            return False
        if kind in (_WHOLE, _FIRST):
            message = chunk
        elif message:  # its first chunk may lie before the tail
            message += chunk
        if kind in (_WHOLE, _LAST) and _EXIT in _fields(message):
            return True
        place += length
        if _BLOCK - place % _BLOCK < _HEADER:  # too short for a header: it is filled with zeros
            place += _BLOCK - place % _BLOCK
    return False


def gets_end(file: Path) -> bool:
    """Return whether the file of a run has its end, or gets it within :data:`LATE` seconds."""
    until = time.monotonic() + LATE
    while not (found := has_end(file)) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def _fields(message: bytes) -> Iterator[int]:
    """Yield the numbers of the fields of a message of protobuf, as far as it can be read."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        value, place = _varint(message, place)
        yield tag >> 3
        if tag & 7 == 2:  # bytes, whose length precedes them
            place += value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the integer at ``place``, seven bits a byte, and the place after it."""
    value = shift = 0
    for byte in message[place:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        place += 1
        if byte < 0x80:
            break
    return value, place
