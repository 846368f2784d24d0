"""Whether gradients were clipped at the right place of a step: marks from check to check.

The first check of a process registers a hook on all optimizers, so the order of the calls is known
from the second step on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from runner.check.parts import Part
from runner.gradients.shard import local


class _Marks:
    """Gradients of parameters at some time: the tensors, and how often they had been written."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [local(parameter.grad) for parameter in trained]  # type: ignore[arg-type]
        self._numbers = {id(parameter): number for number, parameter in enumerate(trained)}
        self._gradients = [TensorWeakRef(gradient) for gradient in gradients]
        self._versions = [gradient._version for gradient in gradients]
        self._weight_versions = [local(parameter)._version for parameter in trained]

    def unchanged(self, part: Part) -> bool:
        """Return whether a part has the gradient of that time, and nothing wrote to it since."""
        number = self._number_of(part)
        return number is not None and self._versions[number] == _gradient_of(part)._version

    def added_to(self, part: Part) -> bool:
        """Return whether the gradient of that time was written to, but the weight was not."""
        number = self._number_of(part)
        if number is None:
            return False
        stepped = self._weight_versions[number] != local(part.parameter)._version
        return self._versions[number] < _gradient_of(part)._version and not stepped

    def _number_of(self, part: Part) -> int | None:
        """Return the number of a part that has the gradient of that time, else None."""
        number = self._numbers.get(id(part.parameter))
        if number is None or self._gradients[number]() is not _gradient_of(part):
            return None
        return number


_SAMPLE = 64  # trained parts that stand for all others: marks of thousands would cost time
_stepped: WeakKeyDictionary[Optimizer, _Marks] = WeakKeyDictionary()  # at the last step
_clipped = WeakIdKeyDictionary()  # for the first parameter of a model, when clipped
_hooks: list[Any] = []


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _stepped[optimizer] = _Marks(parameters)


def entered(parts: list[Part]) -> list[str]:
    """Return what is wrong with the order of calls up to a clipping."""
    if not _hooks:
        hook = register_optimizer_step_post_hook(_after_step)
        _hooks.append(hook)
    if not parts:
        return []
    first = parts[0].parameter
    sample = _sample(parts)
    problems = []
    if _hold_for_all(_was_stepped, sample):
        problems.append(
            "clipped after the step: these gradients were already stepped by the optimizer"
        )
    marks: _Marks | None = _clipped.get(first)  # type: ignore[no-untyped-call]
    if marks is not None and _hold_for_all(marks.added_to, sample):
        problems.append(
            "clipped per microbatch: more gradients were added to clipped ones, without a step "
            "between; clip once, after the last backward() of a step"
        )
    return problems


def _sample(parts: list[Part]) -> list[Part]:
    """Return some of the trained parts, the same ones each time."""
    trained = [part for part in parts if part.parameter.requires_grad]
    return trained[:: max(1, len(trained) // _SAMPLE)]


def _hold_for_all(condition: Callable[[Part], bool], parts: list[Part]) -> bool:
    """Return whether there are gradients, and a condition holds for all of them."""
    count = 0
    for part in parts:
        if part.parameter.grad is not None:
            if not condition(part):
                return False
            count += 1
    return count > 0


def _was_stepped(part: Part) -> bool:
    """Return whether an optimizer stepped this gradient, and nothing has changed it since."""
    return any(marks.unchanged(part) for marks in list(_stepped.values()))


def _gradient_of(part: Part) -> Tensor:
    """Return the tensor itself, which optimizers and other checks see; the part has a gradient."""
    return local(part.parameter.grad)  # type: ignore[arg-type]


def left(parts: list[Part], finite: bool) -> None:
    """Remember the gradients that were clipped; a step that is not finite may be skipped."""
    if not parts:
        return
    first = parts[0].parameter
    _clipped.pop(first, None)  # type: ignore[no-untyped-call]
    if finite:
        _clipped[first] = _Marks([part.parameter for part in _sample(parts)])
