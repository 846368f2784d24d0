"""The wrapper of a boosted model; what a model has to be before boost, and to stay after it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from runner.config.notation import first_few
from runner.parallel.hooks import computed_with, held_tensors
from runner.parallel.stages import full_precision

if TYPE_CHECKING:
    from runner.booster.optimizer import OptimizerWrapper
    from runner.parallel.pipeline import Pipeline

wrappers: WeakKeyDictionary[nn.Module, ReferenceType[ModelWrapper]] = WeakKeyDictionary()
"""The wrapper of each model that was boosted, by the user's model."""

_BEFORE = "change the model before booster.boost, or no gradient of it is synchronised and clipped"


class ModelWrapper(nn.Module):
    """A boosted model: the forward pass runs under autocast and returns float32 outputs.

    ``renamed``: see :class:`ParallelModel`; ``names``: each name in the state dict of the whole
    model, with the first name of its tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        renamed: Mapping[str, str],
        names: Mapping[str, str],
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self.module, self.dtype, self.pipeline = module, dtype, pipeline
        self.renamed, self.names = renamed, names
        self.optimizer: OptimizerWrapper | None = None
        self.boosted: BoostedParameters | None = None  # where there is an optimizer
        self.watch: Callable[[Tensor], None] | None = None  # gets outputs of passes that train

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWrapper:
        """Copy the model without its optimizer, for an average of its weights."""
        sharded = any(isinstance(module, FSDPModule) for module in self.modules())
        if sharded or self.pipeline is not None:
            raise TypeError(
                "a model that is sharded or cut into stages cannot be copied: for an average of "
                "its weights, average what booster.state_dict returns, or boost a copy as well"
            )
        for module in self.module.modules():
            groups = [v for v in vars(module).values() if isinstance(v, dist.ProcessGroup)]
            memo.update({id(group): group for group in groups})
        return ModelWrapper(copy.deepcopy(self.module, memo), self.dtype, self.renamed, self.names)

    def unwrap(self) -> nn.Module:
        """Return the user's model."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; half-precision outputs become float32, so that losses are exact."""
        if self.pipeline is not None:
            raise RuntimeError("this model is cut into stages: call booster.execute_pipeline")
        trains = torch.is_grad_enabled()
        if self.boosted is not None and trains and not torch.compiler.is_compiling():
            self.boosted.require_same()
        if self.dtype is None:
            outputs = self.module(*args, **kwargs)
        else:
            device = next(self.module.parameters()).device.type
            with torch.autocast(device, self.dtype):
                outputs = self.module(*args, **kwargs)
            outputs = tree_map_only(Tensor, full_precision, outputs)
        if trains and self.watch is not None:
            for output in held_tensors(outputs):
                self.watch(output)
        return outputs


def no_backward(model: nn.Module, output: Tensor) -> None:
    """Refuse a backward pass into a model that was boosted without an optimizer."""

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError(
            "the gradients of this model are averaged over ranks in the step of its optimizer: "
            "give boost the optimizer with the model"
        )

    if output.grad_fn is not None and any(p.requires_grad for p in model.parameters()):
        output.register_hook(refuse)  # type: ignore[no-untyped-call]


class BoostedParameters:
    """The parameters at boost: others would be neither synchronised nor clipped.

    ``alone``: in one process, where they may be converted, and frozen while they have a gradient.
    """

    def __init__(self, model: nn.Module, renamed: Mapping[str, str], alone: bool) -> None:
        self._model = model
        self._renamed = renamed
        self._alone = alone
        # With the name, by the id of each parameter, which is held: no other tensor gets this id.
        self._known = {id(parameter): (name, parameter) for name, parameter in self._named()}
        self._trained = [parameter.requires_grad for _, parameter in self._known.values()]
        self._asked = False
        self._record()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that the model has now, with their names at boost."""
        named = []
        for name, parameter in self._model.named_parameters():
            named.append((self._renamed.get(name, name), parameter))
        return named

    def _record(self) -> None:
        """Note what the dictionaries of all modules hold, and the type of each parameter."""
        self._dicts: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._dicts.append(module._parameters)
            self._dicts.append(module._modules)
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        for slots in self._dicts:
            for key, value in slots.items():
                self._slots.append((slots, key, value))
        self._values = [value for _, _, value in self._slots]
        self._parameters = [parameter for _, parameter in self._known.values()]
        self._dtypes = [parameter.dtype for parameter in self._parameters]

    def require_same(self) -> None:
        """Check that the model has the parameters of boost; it looks at dictionaries alone."""
        self._asked = True
        values = [value for slots in self._dicts for value in slots.values()]
        same = len(values) == len(self._values)
        # Each step compares them: a loop without bytecode takes a third of the time.
        same = same and all(map(is_, values, self._values))
        if same and not self._alone:
            same = [parameter.dtype for parameter in self._parameters] == self._dtypes
        if not same:
            self._compare()

    def _compare(self) -> None:
        """Raise an error that names what has changed; else note the modules as they are now."""
        if any(type(slots.get(key)) is Tensor for slots, key, _ in self._slots):
            return  # torch.func.functional_call computes with tensors of its own.
        named = self._named()
        present = {id(parameter) for _, parameter in named}
        self._require_present(present)
        # FSDP computes with unsharded parameters, which stand in the slots of the sharded ones.
        computing = {id(computed_with(parameter)) for parameter in self._parameters}
        unsharded = computing - self._known.keys()
        allowed = (self._known.keys() - self._moved()) | unsharded
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in allowed:
                raise ValueError(f"{name} was added after boost: {_BEFORE}")
        if not present & unsharded:
            self._record()

    def _moved(self) -> set[int]:
        """Return the ids of what stands in a slot in which something else stood before."""
        moved = set()
        for slots, key, value in self._slots:
            # A slot may hold None, for a parameter that was tied to another stage's parameter.
            value_now = slots.get(key, value)
            if value_now is not value:
                moved.add(id(value_now))
        return moved

    def _require_present(self, present: Collection[int]) -> None:
        """Check that no parameter was removed or converted; ``present``: ids of all parameters."""
        for (name, parameter), dtype in zip(self._known.values(), self._dtypes, strict=True):
            if id(parameter) not in present and id(computed_with(parameter)) not in present:
                raise ValueError(f"{name} was replaced, removed or tied after boost: {_BEFORE}")
            if parameter.dtype != dtype and not self._alone:
                raise ValueError(
                    f"{name} is {parameter.dtype}, but was {dtype} at boost: {_BEFORE}"
                )

    def require_final(self) -> None:
        """Check, once a step, that parameters are as at boost, and none frozen with a gradient."""
        if not self._asked:  # by a forward pass of this step
            self.require_same()
        self._asked = False
        trained = self._trained
        if not self._alone:
            trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:
            for (name, parameter), was in zip(self._known.values(), self._trained, strict=True):
                if was and not parameter.requires_grad and parameter.grad is not None:
                    raise ValueError(
                        f"{name} was frozen while it has a gradient: freeze it after "
                        "optimizer.zero_grad() and before the next forward pass"
                    )
        self._trained = trained


def checked(model: nn.Module, criterion: Any, plugin: str) -> tuple[nn.Module, dict[str, str]]:
    """Refuse a model that cannot be boosted; ``plugin``: name of one over ranks, else empty.

    Returns it, compiled in place where :func:`torch.compile` wrapped it, and each name in its state
    dict with the first name of its tensor.
    """
    model = _compiled_in_place(model)
    if not plugin and model in wrappers:  # A notebook makes a new Trainer of the same model.
        gc.collect()  # A Trainer and its wrapper refer to each other.
        if wrappers[model]() is None:
            del wrappers[model]
    if model in wrappers or isinstance(model, ModelWrapper):
        raise ValueError(
            f"this {type(model).__name__} is boosted already: boost a model once, with all its "
            "optimizers, booster.boost(model, [first, second], ...), or build the model anew"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise TypeError(f"{name} is complex: clipping is defined on real parameters")
    if isinstance(criterion, nn.Module):
        _require_part_of(model, criterion)
    if plugin:
        _require_dense_gradients(model, plugin)
    first: dict[int, str] = {}
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names[name] = first.setdefault(id(tensor), name)
    return model, names


def _require_part_of(model: nn.Module, criterion: nn.Module) -> None:
    """Refuse a criterion with parameters that the model does not have."""
    of_model = {id(parameter) for parameter in model.parameters()}
    trained = [(name, p) for name, p in criterion.named_parameters() if p.requires_grad]
    foreign = [name for name, p in trained if id(p) not in of_model]
    if foreign:
        raise ValueError(
            f"the criterion has parameters ({first_few(foreign)}), which are no part of the model: "
            "give them to the model, whose method loss(outputs, batch) may compute the loss"
        )


def _require_dense_gradients(model: nn.Module, plugin: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or type(module).__name__} has sparse gradients, which {plugin} cannot "
                "synchronise: build the layer with sparse=False"
            )


def _compiled_in_place(model: nn.Module) -> nn.Module:
    """Compile in place what :func:`torch.compile` wrapped, which adds ``_orig_mod.`` to names."""
    top = nn.ModuleList([model])
    for parent in list(top.modules()):
        for name, child in parent._modules.items():
            inner = None if child is None else child._modules.get("_orig_mod")
            if inner is not None and hasattr(child, "dynamo_ctx"):
                inner._compiled_call_impl = child.dynamo_ctx(inner._call_impl)  # type: ignore
                parent._modules[name] = inner
    return top[0]
