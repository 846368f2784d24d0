"""Parameters that boost has replaced: an optimizer that still holds them would move nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class ReplacedParameter(nn.Parameter):
    """A parameter of the user's model that boost has replaced by the part of this rank.

    No backward pass reaches it, so an optimizer of torch would skip it in each step.
    """

    replaced_name: str

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            f"{self.replaced_name} was replaced when the model was boosted, but an optimizer (or "
            "other code) still uses the gradient of the old parameter, which never gets one: give "
            "all optimizers to one booster.boost(model, [first, second]), or make the optimizer "
            "from the parameters of the boosted model"
        )

    grad = property(_refuse, _refuse)


def refuse_replaced(
    before: Mapping[str, nn.Parameter], model: nn.Module, renamed: Mapping[str, str]
) -> None:
    """Let parameters that the model has lost refuse to be stepped.

    Args:
        before: the parameters before boost, by name.
        model: the boosted model.
        renamed: names before boost, by the names in the boosted model.
    """
    names = set[str]()
    boosted_ids = set[int]()
    for local_name, parameter in model.named_parameters():
        names.add(renamed.get(local_name, local_name))
        boosted_ids.add(id(parameter))
    for name, parameter in before.items():
        # Nothing replaces a parameter of another stage on this rank: its own rank steps it.
        is_replaced = name in names and id(parameter) not in boosted_ids
        if is_replaced and type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter
            parameter.replaced_name = name  # type: ignore[attr-defined]
