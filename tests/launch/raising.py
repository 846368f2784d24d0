"""Parts of a run that raise an exception where a test plants it: model, data, criterion and so on.

The model is made with the place of the fault and the ranks that raise it; ``PLANTED`` has both.
"""

import gc
import os
import signal
import threading
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from runner.data import Data
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT

SIZES = {"vocabulary": 16, "context": 8, "layers": 2, "heads": 2, "width": 8, "dropout": 0.0}
PLANTED = {"fault": "none", "ranks": [0]}
BEFORE = 3  # calls of one place before the one that fails


class PlantedError(Exception):
    """What the planted faults raise, with a KeyError as their cause."""


class Counted:
    """Counts the calls of a place, and tells which one fails."""

    def __init__(self, *faults):
        self.faults, self.calls = faults, 0

    def fails(self):
        rank = int(os.environ.get("RANK", -1))  # of the command, which checks the request: none
        if PLANTED["fault"] not in self.faults or rank not in PLANTED["ranks"]:
            return False
        self.calls += 1
        return self.calls > BEFORE


def fail(out_of_memory=False):
    if out_of_memory:
        torch.empty(2**50)
    raise PlantedError("planted error") from KeyError("planted cause")


class BadTextError(Exception):
    """Its text can't be made."""

    def __str__(self):
        raise ValueError("no text")


def unpicklable():
    class LocalError(Exception):
        """Cannot be pickled: it is defined in a function, and holds a lock."""

    error = LocalError("planted error")
    error.lock = threading.Lock()
    return error


ODD_ERRORS = {
    "unpicklable": unpicklable,
    "keyboard": lambda: KeyboardInterrupt("planted error"),
    "system exit": lambda: SystemExit(0),
    "group": lambda: ExceptionGroup("planted group", [PlantedError("planted error"), KeyError(2)]),
    "surrogate": lambda: PlantedError("planted \udcff\x00 error"),
    "bad text": BadTextError,
    "stop iteration": lambda: StopIteration("planted error"),
    "generator exit": lambda: GeneratorExit("planted error"),
}
ODD = [*ODD_ERRORS, "os exit 0", "os exit 3", "recursion", "warning"]


def fail_oddly(fault):
    """End in a way that is no ordinary exception."""
    if fault.startswith("os exit"):
        os._exit(int(fault[-1]))
    if fault == "recursion":
        fail_oddly(fault)
    if fault == "warning":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.warn("planted warning", UserWarning, stacklevel=1)
    raise ODD_ERRORS[fault]()


class InDel:
    """Raises an exception where none can be raised."""

    def __del__(self):
        raise PlantedError("planted error")


class Backward(torch.autograd.Function):
    """Fails in its backward pass."""

    @staticmethod
    def forward(ctx, hidden, out_of_memory):
        ctx.out_of_memory = out_of_memory
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        if PLANTED["fault"] == "kill backward":
            os.kill(os.getpid(), signal.SIGKILL)
        fail(ctx.out_of_memory)


def hook(gradient):
    fail()


class Planted(nn.Module):
    """In place of a dropout layer of each block."""

    def __init__(self):
        super().__init__()
        names = ("forward", "forward memory", "function", "backward memory", "hook", "in-place")
        self.counted = Counted(*names, "kill", "kill backward", "thread", "del", *ODD)
        self.evaluated = Counted("evaluation")

    def forward(self, hidden):
        if not self.training and hidden.device.type != "meta" and self.evaluated.fails():
            fail()
        fault = PLANTED["fault"]
        if not self.training or not self.counted.fails():
            return hidden
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "thread":
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            return hidden
        if fault == "del":
            InDel()
            gc.collect()
            return hidden
        if fault in ODD:
            fail_oddly(fault)
        if fault in ("forward", "forward memory"):
            fail("memory" in fault)
        if fault == "hook":
            hidden = hidden.clone()
            hidden.register_hook(hook)
            return hidden
        if fault == "in-place":
            changed = hidden.exp()
            result = changed * changed
            changed.add_(1.0)
            return result
        return Backward.apply(hidden, "memory" in fault)


def gpt(fault, ranks, mixture=False):
    PLANTED.update(fault=fault, ranks=list(ranks))
    kind = MixtureGPT if mixture else GPT
    options = {"experts": 2, "top_k": 1} if mixture else {}
    model = kind(**SIZES, tied=False, bias=True, **options)
    for block in model.blocks:
        block.dropout = Planted()
    return model


class Tokens(Dataset):
    def __init__(self, samples=64):
        self.tokens = torch.arange(samples * 9).view(samples, 9) % SIZES["vocabulary"]
        self.counted = Counted("data")

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        if self.counted.fails():
            fail()
        return self.tokens[index, :-1], self.tokens[index, 1:]


def data(samples=64):
    return Data(Tokens(samples), Tokens(16), "tokens", tokens_per_sample=8)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.counted = Counted("criterion")

    def forward(self, outputs, targets):
        if self.counted.fails():
            fail()
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Optimizer(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        constructions = Counted("constructor")
        constructions.calls = BEFORE
        if constructions.fails():
            fail()
        self.counted = Counted("step", "step memory")

    def step(self, closure=None):
        if self.counted.fails():
            fail("memory" in PLANTED["fault"])
        super().step(closure)


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer):
        self.counted = Counted("scheduler")
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, *args):
        if self.counted.fails():
            fail()
        super().step(*args)

    def state_dict(self):
        return {key: value for key, value in super().state_dict().items() if key != "counted"}


class Callback:
    """Its state is saved with a checkpoint."""

    def __init__(self):
        self.checkpoint = Counted("checkpoint")
        self.callback = Counted("callback")

    def on_step(self, trainer, metrics):
        if self.callback.fails():
            fail()

    def state_dict(self):
        if self.checkpoint.fails():
            fail()
        return {}

    def load_state_dict(self, state):
        pass
