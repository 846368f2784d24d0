"""Keep freed memory in a process that trains on a CPU, for the next step.

glibc gives large blocks back to the system when they are freed. A training frees its activations
and allocates them again in each step, and then the system has to map and clear every page anew: a
step of a small convolutional network takes 1.2 to 1.6 times as long.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``, from ``malloc.h``."""

_NEVER = -1
"""Trim threshold of a heap that never shrinks."""

_LARGEST = (2**30, 2**25)
"""Blocks up to this size, in bytes, come from the heap. Older versions of glibc take the second."""


def keep_freed_memory(device: str) -> None:
    """Let glibc keep the memory that this process frees, instead of giving it to the system."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if device != "cpu" or chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST):
        mallopt(_TRIM_THRESHOLD, _NEVER)
