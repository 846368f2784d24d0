"""The accelerator's code on CPU tensors: metrics stay tensors, and the host reads none of them."""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner.gradients import transfer


@contextmanager
def kept_on_device():
    """Treat the CPU as an accelerator: reading a value of it is not free."""
    with patch.object(transfer, "can_read", lambda device: False):
        yield


def call_kept_on_device(body, *args):
    """Return ``body(*args)``, computed as on an accelerator; for :func:`tests.ranks.run_ranks`."""
    with kept_on_device():
        return body(*args)


class Waits(TorchDispatchMode):
    """Records what would make the host wait for an accelerator, by the line that asks for it.

    A value that is read, an index by a mask (whose size is read), and a tensor that is made of
    Python numbers elsewhere than in ``transfer.on_device``, which copies without waiting.
    """

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        by = args[1] if name in ("index", "index_put_") else ()
        masks = any(index is not None and index.dtype == torch.bool for index in by)
        if name in self.READS or masks or name == "lift_fresh":
            frame = sys._getframe(1)
            functions = []
            while frame is not None:
                functions.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
                frame = frame.f_back
            ours = [place for place in functions if "/runner/" in place[1]]
            if ours and not (name == "lift_fresh" and "on_device" in ours[0][0]):
                self.found.append(f"{name} in {ours[0][0]} ({ours[0][1]}:{ours[0][2]})")
        return func(*args, **(kwargs or {}))
