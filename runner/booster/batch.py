"""The batches that a training loop reads, and how one goes to a model.

* ``(x1, x2, targets)`` goes to the model as ``model(x1, x2)``: the last entry of a tuple or list
  holds the targets. A mapping as the only input goes as keyword arguments. A model whose
  ``forward(x, targets=None)`` has a parameter ``targets`` or ``target`` gets them too, so that it
  can return a loss, if no criterion is given.
* A dictionary (any mapping, or a dataclass) goes as keyword arguments, ``model(**batch)``. The
  model gets its targets (:data:`TARGETS`) too where ``forward`` takes them and no criterion is
  given, so that it can return a loss. A ``forward`` with a parameter ``batch`` gets it whole.
* A model with a method ``loss(outputs, batch)`` gets every batch whole, as ``model(batch)``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from runner.parallel.hooks import held_tensors

TARGETS = ("labels", "targets", "target", "label", "y")
"""Names of the targets in a dictionary or a dataclass; the first one that is there counts."""

_WHOLE = "or give the model a method loss(outputs, batch), which gets the whole batch, as forward"


class BatchError(TypeError):
    """A batch has a structure that the training loop cannot read."""


class ModelCall(NamedTuple):
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def only_tensor(self) -> Tensor:
        """Return the input of a model that takes one tensor."""
        given = dict(enumerate(self.args)) | dict(self.kwargs)
        if len(given) > 1 and (own := target_name(self.kwargs)):
            del given[own]  # The last stage returns no loss.
        if len(given) == 1 and isinstance(inputs := next(iter(given.values())), Tensor):
            return inputs
        raise BatchError(
            "a pipeline sends one tensor [samples, ...] from stage to stage, and this batch has "
            f"the inputs {', '.join([*map(_described, self.args), *self.kwargs]) or 'none'}: give "
            "the batch one input beside its targets"
        )


class Calls:
    """How a model is called with a batch."""

    def __init__(self, model: nn.Module, whole: bool, labelled: bool) -> None:
        self._whole, self._labelled, self._kind = whole, labelled, type(model).__name__
        parameters = inspect.signature(model.forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = {one.name: one.default is one.empty for one in parameters if one.kind in named}
        self._names, self._required = taken.keys(), {name for name in taken if taken[name]}
        self._order = list(taken)
        self._takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)

    def of(self, batch: Any) -> ModelCall:
        if self._whole:
            return ModelCall((batch,))
        if isinstance(batch, tuple | list) and len(batch) > 1:
            first = batch[0]
            if len(batch) == 2 and isinstance(first, Mapping) and self._by_name(first):
                return ModelCall(kwargs=first)
            inputs = tuple(batch[:-1])
            name = self._takes_targets(len(inputs))
            return ModelCall(inputs, {} if name is None else {name: batch[-1]})
        named = named_parts(batch)
        if named is None:
            raise not_readable(batch)
        if self._by_name(named):
            own, kept = target_name(named), dict(named)
            takes = own in self._names or self._takes_any
            if own is not None and own not in self._required and not (self._labelled and takes):
                del kept[own]
            return ModelCall(kwargs=kept)
        if "batch" in self._names:
            return ModelCall((batch,))
        raise BatchError(
            f"the forward of {self._kind} takes {', '.join(self._names)}, but the batch is "
            f"{_described(batch)}: give the DataLoader a collate_fn that returns entries with "
            f"these names, {_WHOLE}"
        )

    def _takes_targets(self, inputs: int) -> str | None:
        """Return the parameter after the inputs that takes the last entry of a tuple.

        None if a criterion is given. ``labels`` are not passed: causal models of
        transformers shift them, and the targets of a tuple are shifted already.
        """
        for name in self._order[inputs:] if self._labelled else ():
            if name in ("targets", "target") or (name in TARGETS and name in self._required):
                return name
        return None

    def _by_name(self, named: Mapping[str, Any]) -> bool:
        takes_any = self._takes_any and not self._required
        return takes_any or any(name in named for name in self._names)


def named_parts(batch: Any) -> Mapping[str, Any] | None:
    if isinstance(batch, Mapping):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return {one.name: getattr(batch, one.name) for one in fields(batch)}
    return None


def target_name(named: Mapping[str, Any]) -> str | None:
    return next((name for name in TARGETS if isinstance(named.get(name), Tensor)), None)


def targets_of(batch: Any) -> Tensor | None:
    """Return the targets of a batch; None if it has none that are a tensor [samples, ...]."""
    if isinstance(batch, tuple | list):
        targets = batch[-1] if len(batch) > 1 else None
    else:
        named = named_parts(batch) or {}
        targets = named.get(target_name(named) or "")
    return targets if isinstance(targets, Tensor) and targets.ndim else None


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch of any structure with ``change(tensor)`` in place of each tensor."""
    if type(batch) in (tuple, list):
        return type(batch)(mapped(each, change) for each in batch)
    if (named := named_parts(batch)) is None:
        return tree_map_only(Tensor, change, batch)
    changed = {name: mapped(value, change) for name, value in named.items()}
    if not isinstance(batch, Mapping):
        return replace(batch, **changed)
    made: Any = copy.copy(batch)  # pytree does not know every mapping
    made.update(changed)
    return made


def batch_size(batch: Any) -> int:
    for tensor in held_tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise BatchError(f"{_described(batch)} is no batch: it holds no tensor [samples, ...]")


def not_readable(batch: Any) -> BatchError:
    return BatchError(
        "a batch has to be a pair (inputs, targets), a longer tuple that ends with the targets, or "
        f"a dictionary or dataclass whose targets are called {', '.join(TARGETS[:-1])} or "
        f"{TARGETS[-1]}; targets are a tensor [samples, ...]. This one is {_described(batch)}: "
        f"give the DataLoader a collate_fn that returns such a batch, {_WHOLE}"
    )


def _described(batch: Any) -> str:
    named = named_parts(batch)
    keys = "" if named is None else f" with the keys {', '.join(map(repr, named))}"
    return f"a {type(batch).__name__}{keys}"
