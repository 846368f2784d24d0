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
from collections.abc import Callable, Mapping, Sequence
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
    """The arguments that a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def only_tensor(self) -> Tensor:
        """Return the input of a model that takes one tensor."""
        inputs = {**self.kwargs}
        target = target_name(self.kwargs)
        if target is not None and len(self.args) + len(inputs) > 1:
            del inputs[target]  # The last stage returns no loss.
        values = [*self.args, *inputs.values()]
        if len(values) == 1 and isinstance(values[0], Tensor):
            return values[0]
        described = ", ".join([*(_described(value) for value in self.args), *self.kwargs])
        raise BatchError(
            "a pipeline sends one tensor [samples, ...] from stage to stage, and this batch has "
            f"the inputs {described or 'none'}: give the batch one input beside its targets"
        )


class Calls:
    """How a model is called with a batch."""

    def __init__(self, model: nn.Module, whole: bool, labelled: bool) -> None:
        self._whole = whole
        self._labelled = labelled
        self._kind = type(model).__name__
        self._names: list[str] = []  # of the parameters of ``forward``, in its order
        self._required: set[str] = set()
        self._takes_any = False
        for parameter in inspect.signature(model.forward).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_any = True
            elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                self._names.append(parameter.name)
                if parameter.default is parameter.empty:
                    self._required.add(parameter.name)

    def of(self, batch: Any) -> ModelCall:
        """Return the call for a batch; a BatchError says that the model cannot take it."""
        if self._whole:
            return ModelCall((batch,))
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return self._of_tuple(batch)
        named = named_parts(batch)
        if named is None:
            raise not_readable(batch)
        if self._by_name(named):
            return ModelCall(kwargs=self._with_wanted_targets(named))
        if "batch" in self._names:
            return ModelCall((batch,))
        raise BatchError(
            f"the forward of {self._kind} takes {', '.join(self._names)}, but the batch is "
            f"{_described(batch)}: give the DataLoader a collate_fn that returns entries with "
            f"these names, {_WHOLE}"
        )

    def _of_tuple(self, batch: Sequence[Any]) -> ModelCall:
        """Return the call for a tuple or a list whose last entry holds the targets."""
        first = batch[0]
        if len(batch) == 2 and isinstance(first, Mapping) and self._by_name(first):
            return ModelCall(kwargs=first)
        inputs = tuple(batch[:-1])
        name = self._takes_targets(len(inputs))
        return ModelCall(inputs, {} if name is None else {name: batch[-1]})

    def _with_wanted_targets(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model, with the targets only if it is to get them.

        It gets targets that it requires, and targets that it can take if no criterion is given.
        """
        parts = dict(named)
        target = target_name(named)
        if target is None or target in self._required:
            return parts
        can_take = target in self._names or self._takes_any
        if not (self._labelled and can_take):
            del parts[target]
        return parts

    def _takes_targets(self, inputs: int) -> str | None:
        """Return the parameter after the inputs that takes the last entry of a tuple.

        None if a criterion is given. ``labels`` are not passed: causal models of
        transformers shift them, and the targets of a tuple are shifted already.
        """
        if not self._labelled:
            return None
        for name in self._names[inputs:]:
            if name in ("targets", "target") or (name in TARGETS and name in self._required):
                return name
        return None

    def _by_name(self, named: Mapping[str, Any]) -> bool:
        takes_any = self._takes_any and not self._required
        return takes_any or any(name in named for name in self._names)


def named_parts(batch: Any) -> Mapping[str, Any] | None:
    """Return the entries of a mapping or a dataclass by name; None of another batch."""
    if isinstance(batch, Mapping):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return None


def target_name(named: Mapping[str, Any]) -> str | None:
    """Return the name of the targets in a batch; None if no tensor has one of :data:`TARGETS`."""
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
        return type(batch)(mapped(part, change) for part in batch)
    named = named_parts(batch)
    if named is None:
        return tree_map_only(Tensor, change, batch)
    changed = {name: mapped(value, change) for name, value in named.items()}
    if not isinstance(batch, Mapping):
        return replace(batch, **changed)
    mapping: Any = copy.copy(batch)  # pytree does not know every mapping
    mapping.update(changed)
    return mapping


def batch_size(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor that has a dimension.

    Raises:
        BatchError: no tensor has one.
    """
    for tensor in held_tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise BatchError(f"{_described(batch)} is no batch: it holds no tensor [samples, ...]")


def not_readable(batch: Any) -> BatchError:
    """Return the error of a batch whose inputs and targets cannot be told apart."""
    return BatchError(
        "a batch has to be a pair (inputs, targets), a longer tuple that ends with the targets, or "
        f"a dictionary or dataclass whose targets are called {', '.join(TARGETS[:-1])} or "
        f"{TARGETS[-1]}; targets are a tensor [samples, ...]. This one is {_described(batch)}: "
        f"give the DataLoader a collate_fn that returns such a batch, {_WHOLE}"
    )


def _described(batch: Any) -> str:
    named = named_parts(batch)
    if named is None:
        return f"a {type(batch).__name__}"
    return f"a {type(batch).__name__} with the keys {', '.join(repr(name) for name in named)}"
