"""Read from wandb's own file how far a run is recorded.

A killed process loses the rows that wandb's client has not written yet: a row that was logged may
be missing. The format is LevelDB's log: blocks of 32 KiB, in which records are
split into chunks of a checksum, a length, a kind and the data; each record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.run_folder import files, keys

_BLOCK = 2**15  # bytes
_HEADER = struct.Struct("<IHB")  # of a chunk: checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4  # kinds of chunks; 3 is one in the middle of a record
_FILE_HEADER = 7  # bytes at the start of a file
_TAIL = 2**20  # bytes at the end of a file that usually hold a row


def last_recorded_step(folder: Path, run_id: str) -> int | None:
    """Return the last optimizer step in wandb's files of a run, 0 for no row; None for no file."""
    recorded = folder.glob(f"{files.WANDB}/*run-*/run-{run_id}.wandb")
    return max((_last_step(file) for file in recorded), default=None)


def _last_step(file: Path) -> int:
    size = file.stat().st_size
    tail = _TAIL
    while True:
        start = max(0, size - tail) // _BLOCK * _BLOCK
        with file.open("rb") as opened:
            opened.seek(start)
            data = opened.read()
        steps = [*_steps(data, _FILE_HEADER if start == 0 else 0)]
        if steps or start == 0:
            return max(steps, default=0)
        tail *= 8


def _steps(data: bytes, position: int) -> Iterator[int]:
    from wandb.proto import wandb_internal_pb2

    message: Any = wandb_internal_pb2
    for content in _records(data, position):
        record = message.Record()
        record.ParseFromString(content)
        for item in record.history.item:
            if keys.TRAIN_STEP in (item.key, ".".join(item.nested_key)):
                yield int(json.loads(item.value_json))


def _records(data: bytes, position: int) -> Iterator[bytes]:
    """Yield the records that begin in ``data``, which begins with a block, and are whole."""
    record: bytes | None = None
    while position + _HEADER.size <= len(data):
        block_end = _BLOCK - position % _BLOCK
        if block_end < _HEADER.size:  # no chunk begins in the last bytes of a block
            position += block_end
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        chunk = data[position : position + length]
        position += length
        if kind == 0 or len(chunk) < length:  # the client was killed while it wrote this
            return
        if kind in (_WHOLE, _FIRST):
            record = chunk
        elif record is not None:
            record += chunk
        if record is not None and kind in (_WHOLE, _LAST):
            yield record
            record = None
