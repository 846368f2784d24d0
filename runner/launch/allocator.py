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


def keep_freed_memory(device: str) -> bool:
    """Let glibc keep the memory that this process frees, instead of giving it to the system.

    The process then holds what it needed at its peak until it ends.

    Args:
        device: type of the device that the process trains on.

    Returns:
        Whether that was set. It is not where training does not use the memory of the host, where
        the user has chosen by a variable ``MALLOC_*`` or ``GLIBC_TUNABLES``, or where memory comes
        from another allocator, such as jemalloc.
    """
    if device != "cpu" or _is_chosen():
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        served_by_glibc = _address(ctypes.CDLL(None).malloc) == _address(libc.malloc)
        mallopt = libc.mallopt
        _ = libc.gnu_get_libc_version
    except (OSError, AttributeError):  # another C library
        return False
    if not served_by_glibc:
        return False
    taken = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST)
    return taken and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def _is_chosen() -> bool:
    """Return whether the environment sets how memory is allocated."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    return chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
