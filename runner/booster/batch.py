"""The batches that a training loop reads, and how one goes to a model.

* ``(inputs, targets)`` goes to the model as ``model(inputs)``, ``(x1, x2, targets)`` as
  ``model(x1, x2)``: the last entry of a tuple or list of any length holds the targets. Inputs that
  are a mapping go as keyword arguments.
* A dictionary (any mapping) goes as keyword arguments, ``model(**batch)``. Its targets are the
  entry ``labels``, ``targets``, ``target``, ``label`` or ``y``. The model gets them too where its
  ``forward`` takes them and no criterion is given, so that it can return a loss. A ``forward`` with
  a parameter called ``batch`` gets the dictionary itself.
* A dataclass is a dictionary of its fields.
* A model with a method ``loss(outputs, batch)`` gets every batch whole, as ``model(batch)``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

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
        named = dict(self.kwargs)
        own = target_name(named)
        if own is not None and len(named) + len(self.args) > 1:
            del named[own]  # The last stage returns no loss.
        match [*self.args, *named.values()]:
            case [Tensor() as inputs]:
                return inputs
        given = [*map(_described, self.args), *named]
        raise BatchError(
            "a pipeline sends one tensor [samples, ...] from stage to stage, and this batch has "
            f"the inputs {', '.join(given) or 'none'}: give the batch one input beside its targets"
        )


class Calls:
    """How a model is called with a batch."""

    def __init__(self, model: nn.Module, whole: bool, labelled: bool) -> None:
        self._whole, self._labelled, self._kind = whole, labelled, type(model).__name__
        parameters = inspect.signature(model.forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = {one.name: one.default is one.empty for one in parameters if one.kind in named}
        self._names, self._required = taken.keys(), {name for name in taken if taken[name]}
        self._takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)

    def of(self, batch: Any) -> ModelCall:
        if self._whole:
            return ModelCall((batch,))
        if isinstance(batch, tuple | list) and len(batch) > 1:
            first = batch[0]
            if len(batch) == 2 and isinstance(first, Mapping) and self._by_name(first):
                return ModelCall(kwargs=first)
            return ModelCall(tuple(batch[:-1]))
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
    targets = None
    if isinstance(batch, tuple | list):
        targets = batch[-1] if len(batch) > 1 else None
    elif (named := named_parts(batch)) is not None and (name := target_name(named)):
        targets = named[name]
    return targets if isinstance(targets, Tensor) and targets.ndim else None


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch of any structure with ``change(tensor)`` in place of each tensor."""
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)  # pytree does not know every mapping
        changed.update({key: mapped(value, change) for key, value in batch.items()})
        return changed
    if type(batch) in (tuple, list):
        return type(batch)(mapped(each, change) for each in batch)
    named = named_parts(batch)
    if named is not None:
        return replace(batch, **{name: mapped(value, change) for name, value in named.items()})
    return tree_map_only(Tensor, change, batch)


def tensors(batch: Any) -> Iterator[Tensor]:
    named = named_parts(batch)
    leaves = tree_leaves(batch if named is None else dict(named))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def batch_size(batch: Any) -> int:
    for leaf in tensors(batch):
        if leaf.ndim:
            return len(leaf)
    raise BatchError(
        f"a batch has to hold a tensor [samples, ...]: this {type(batch).__name__} has none"
    )


def not_readable(batch: Any) -> BatchError:
    return BatchError(
        "a batch has to be a pair (inputs, targets), a longer tuple that ends with the targets, or "
        f"a dictionary or dataclass whose targets are called {', '.join(TARGETS[:-1])} or "
        f"{TARGETS[-1]}; targets are a tensor [samples, ...]. This one is {_described(batch)}: "
        f"give the DataLoader a collate_fn that returns such a batch, {_WHOLE}"
    )


def _described(batch: Any) -> str:
    kind = type(batch).__name__
    if (named := named_parts(batch)) is not None:
        return f"a {kind} with the keys {', '.join(map(repr, named))}"
    if not isinstance(batch, tuple | list):
        return f"a {kind}"
    last = type(batch[-1]).__name__ if batch else "nothing"
    return f"a {kind} of {len(batch)} that ends with a {last}"
