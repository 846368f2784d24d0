"""Parts of a model whose forward pass ``torch.fx`` traces: its modules, in the order they run in.

The trace enters modules that only call others. A model can be cut where a single tensor goes on.

``torch.distributed.pipelining.pipeline`` exports a model for the batch shape and the mode (training
or evaluation) that it is given. These parts run the model's own modules, so shapes and mode vary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from runner.parallel.planned_parts import Listed

MODEL = "model"
"""Name of the model in a trace."""

IN_PLACE = frozenset(
    getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior")
)


class _OneInput(nn.Module):
    """Calls a model with one input; all other arguments have their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Any:
        return self.model(inputs)


class _Tracer(fx.Tracer):
    """Enters modules that have no parameters of their own and call others, and the model."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether ``m`` is called as it is."""
        if module_qualified_name == MODEL:
            return False
        own = any(p is not None for p in (*m._parameters.values(), *m._buffers.values()))
        return own or next(m.children(), None) is None


def traced_parts(model: nn.Module) -> Listed:
    """Return the parts of ``model`` in order."""
    graph = _Tracer().trace(_OneInput(model))
    if _differs_in_evaluation(model, graph):
        raise ValueError("its forward differs between training and evaluation")
    nodes = list(graph.nodes)
    first, body = nodes[0], nodes[1:-1]
    output = nodes[-1].args[0]
    if not isinstance(output, fx.Node):
        raise ValueError("its forward returns several outputs")
    parts: list[tuple[list[str], list[fx.Node], fx.Node]] = []
    names: list[str] = []
    since: list[fx.Node] = []
    for place, node in enumerate(body):
        names += _used(node)
        since.append(node)
        goes_on = _goes_on(model, [first, *body[: place + 1]], body[place + 1 :], output)
        if names and goes_on is not None:
            parts.append((names, since, goes_on))
            names, since = [], []
    if since and parts:  # What follows the last module.
        before, made, _ = parts.pop()
        parts.append(([*before, *names], [*made, *since], output))
    enters = [first, *(goes_on for _, _, goes_on in parts)]
    return [
        (tuple(dict.fromkeys(names)), _run_of(model, graph, since, enter, leave))
        for (names, since, leave), enter in zip(parts, enters, strict=False)
    ]


def _used(node: fx.Node) -> list[str]:
    """Return the module that a node calls, or takes a parameter of."""
    target = str(node.target).removeprefix(f"{MODEL}.")
    if node.op == "call_module":
        return [target]
    owner = target.rpartition(".")[0]
    return [owner] if node.op == "get_attr" and owner else []


def _goes_on(
    model: nn.Module, before: Sequence[fx.Node], after: Sequence[fx.Node], output: fx.Node
) -> fx.Node | None:
    """Return the only value of ``before`` that ``after`` uses; None if there are several."""
    later = set(after)
    alive = [node for node in before if node is output or later & set(node.users)]
    if len(alive) != 1 or any(_needs_all(model, user, alive[0]) for user in alive[0].users):
        return None
    return alive[0]


def _needs_all(model: nn.Module, user: fx.Node, value: fx.Node) -> bool:
    """Return whether ``value`` cannot be received by the part of ``user``.

    It may be a tuple, or ``user`` changes it in place, which no received tensor allows.
    """
    if not user.args or user.args[0] is not value:
        return False
    match user.op:
        case "call_module":
            module = model.get_submodule(str(user.target).removeprefix(f"{MODEL}."))
            return bool(getattr(module, "inplace", False))
        case "call_method":
            return str(user.target).endswith("_")
        case "call_function":
            taken = user.target is operator.getitem
            return taken or user.target in IN_PLACE or bool(user.kwargs.get("inplace"))
    return False


def _run_of(
    model: nn.Module, graph: fx.Graph, nodes: Sequence[fx.Node], enter: fx.Node, leave: fx.Node
) -> Callable[[Tensor], Tensor]:
    """Return the function that computes ``leave`` from ``enter``."""
    interpreter = fx.Interpreter(_OneInput(model), garbage_collect_values=False, graph=graph)

    def run(hidden: Tensor) -> Tensor:
        interpreter.env = {enter: hidden}
        try:
            for node in nodes:
                interpreter.env[node] = interpreter.run_node(node)
            result: Tensor = interpreter.env[leave]
            return result
        finally:
            interpreter.env = {}

    return run


def _differs_in_evaluation(model: nn.Module, graph: fx.Graph) -> bool:
    modes: dict[nn.Module, Any] = {module: module.training for module in model.modules()}
    model.train(not model.training)
    try:
        return str(_Tracer().trace(_OneInput(model))) != str(graph)
    finally:
        for module, training in modes.items():
            module.training = training
