"""Import large libraries without looking for garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Pause the garbage collector in this block, which imports ``name`` unless that is done.

    A sixth of the time to import torch is spent in collections that find next to nothing. What is
    alive after the block is never looked at again, so that later collections are faster too.
    """
    if name in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
