"""Find out whether a loss compares each output with the targets of all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.booster.batch import BatchError


class BroadcastError(BatchError):
    """A loss compares each output with the targets of all samples."""


class BroadcastWatch(TorchFunctionMode):
    """Watch the operations of a loss of outputs [B, 1] and targets [B].

    An operation on both makes [B, B] of them. A criterion of torch warns then, and
    ``outputs - targets`` in a function of a user does not.

    Attributes:
        broadcast: whether an operation has combined outputs and targets into [B, B].
    """

    def __init__(self, outputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        # Lists: what is computed of them in the same shape is watched too.
        self._outputs = [outputs]
        self._targets = [targets]
        self.broadcast = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operation, and note what it combines."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        arguments = [argument for argument in args if isinstance(argument, Tensor)]
        of_outputs = _has_one_of(arguments, self._outputs)
        of_targets = _has_one_of(arguments, self._targets)
        samples = len(self._targets[0])
        if of_outputs and of_targets and result.shape == (samples, samples):
            self.broadcast = True
        if of_outputs and result.shape == self._outputs[0].shape:
            self._outputs.append(result)
        if of_targets and result.shape == self._targets[0].shape:
            self._targets.append(result)
        return result


def would_broadcast(outputs: Any, targets: Tensor | None) -> bool:
    """Return whether outputs are [B, 1] and targets [B] of several samples."""
    if targets is None or not isinstance(outputs, Tensor) or targets.ndim != 1:
        return False
    return len(targets) > 1 and outputs.shape == (len(targets), 1)


def is_compiled(criterion: Any) -> bool:
    """Return whether :func:`torch.compile` has wrapped a criterion, whose operations are hidden."""
    return hasattr(criterion, "_torchdynamo_orig_callable") or hasattr(criterion, "_orig_mod")


def _has_one_of(arguments: Iterable[Tensor], watched: Iterable[Tensor]) -> bool:
    identities = {id(tensor) for tensor in watched}
    return any(id(argument) in identities for argument in arguments)
