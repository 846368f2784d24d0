"""Import large libraries without looking for garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Pause the garbage collector in this block, which imports ``name`` unless that is done."""
    if name in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
