"""Which tools clip right, in which layout: every cell is measured with real ranks.

``runner.check_clipping`` gives the truth: float64 arithmetic on whole gradients.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.bench.clip_calls import TOOLS, clips_of, installed
from runner.bench.layouts import LAYOUTS, RANKS, Case
from runner.bench.parallel import on_ranks
from runner.bench.timing import Row, Setting
from runner.check import reference
from runner.gradients.shard import is_dtensor

MODES = ("norm", "value", "adaptive")
_ADAPTIVE = 0.01  # λ of adaptive
_EPS = 1e-3
_TOLERANCES = {torch.bfloat16: 2**-7}  # of a gradient, as a share of the right one
_TOLERANCE = 1e-4
_WORDS = 9  # of a message that is shown


class Truth(NamedTuple):
    """The right answer of a cell: the norm before, the threshold, and gradients by name."""

    norm: float
    limit: float
    gradients: dict[str, Tensor]


class Off(NamedTuple):
    """How far a number is off, as a share of the right one, and both numbers."""

    error: float
    what: str = ""
    measured: float = 0.0
    expected: float = 0.0


def rows(setting: Setting) -> Iterator[Row]:
    """Which tools clip right: layouts on four ranks (gloo) and modes, against float64.

    right: largest error; off: what the tool made, and what is right; raises: the first words
    """
    yield from on_ranks(_measured, RANKS, setting)


def _measured(setting: Setting) -> list[Row]:
    layouts = list(LAYOUTS)[:3] if setting.quick else list(LAYOUTS)
    return cells(layouts, list(installed()), MODES)


def cells(layouts: Iterable[str], tools: Sequence[str], modes: Sequence[str]) -> list[Row]:
    """Measure cells; every rank of four calls this, and has the same rows."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    measured = []
    for layout in layouts:
        for mode in modes:
            for tool in tools:
                with warnings.catch_warnings(action="ignore"):
                    measured.append(cell(layout, tool, mode))
    return measured


def cell(layout: str, tool: str, mode: str) -> Row:
    """Measure one cell; see :func:`cells`."""
    case = LAYOUTS[layout]()
    row = {"layout": layout, "mode": mode, "tool": tool, "version": installed()[tool]}
    clip = clips_of(tool, case.model).get(mode)
    if clip is None:
        return _finished(row, "not applicable", "")
    truth = _truth(case, mode)
    problem = None
    returned: float | None = None
    try:
        returned = _number(clip(truth.limit, case.groups))
    except Exception as error:  # of any kind: the cell shows it
        problem = f"{type(error).__name__}: {error}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, problem)
    problems = [text for text in everywhere if text is not None]
    if problems:
        words = problems[0].split()
        ending = " ..." if len(words) > _WORDS else ""
        return _finished(row, "raises", " ".join(words[:_WORDS]) + ending)
    dist.all_gather_object(everywhere, _off(case.model, truth, returned))
    dtype = next(case.model.parameters()).dtype
    tolerance = _TOLERANCES.get(dtype, _TOLERANCE)
    worst = max((off for offs in everywhere for off in offs), key=lambda off: off.error)
    row["error"] = worst.error
    wrong_norms = [offs[0] for offs in everywhere if offs[0].error > tolerance]
    if wrong_norms:  # which explains gradients that are wrong
        worst = max(wrong_norms, key=lambda off: off.error)
    if worst.error <= tolerance:
        return _finished(row, "right", f"{worst.error:.0e}")
    row |= {"measured": worst.measured, "expected": worst.expected}
    ratio = worst.measured / worst.expected
    text = f"×{ratio:.3g} ({worst.what} {worst.measured:.4g} for {worst.expected:.4g})"
    return _finished(row, "off", text)


def _finished(row: Row, verdict: str, detail: str) -> Row:
    what = f"{row['layout']}, {row['mode']}, {row['tool']}"
    text = f"{what:<62} {verdict:<14} {detail}".rstrip()
    return {**row, "what": what, "verdict": verdict, "detail": detail, "text": text}


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(_whole(value)) if isinstance(value, Tensor) else float(value)


def _whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor in float64; a collective for a DTensor."""
    plain = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return plain.detach().double().clone()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name.removeprefix("module.")] = _whole(parameter.grad)
    return gradients


def _truth(case: Case, mode: str) -> Truth:
    """Return the right answer; a collective."""
    gradients = _gradients(case.model)
    norm = _norm(gradients, case)
    right = {}
    if mode == "norm":
        limit = 0.1 * norm
        _, coefficient = reference.coefficients(norm, limit)
        for name, gradient in gradients.items():
            right[name] = gradient * coefficient
        return Truth(norm, limit, right)
    if mode == "value":
        limit = 0.25 * _largest(gradients)
        for name, gradient in gradients.items():
            right[name] = reference.clamped(gradient, limit)
        return Truth(norm, limit, right)
    for name, parameter in case.model.named_parameters():
        name = name.removeprefix("module.")
        if name in gradients:
            weight = _whole(parameter)
            dims = range(1, weight.ndim) if weight.ndim > 1 else range(weight.ndim)
            right[name] = reference.by_units(gradients[name], weight, dims, _ADAPTIVE, _EPS)
    return Truth(norm, _ADAPTIVE, right)


def _norm(gradients: dict[str, Tensor], case: Case) -> float:
    """Return the norm of the whole model: what differs between ranks is added up over them."""
    total = math.fsum(
        float(reference.power_sum(gradient, 2.0))
        for name, gradient in gradients.items()
        if not any(fnmatch.fnmatch(name, pattern) for pattern in case.groups)
    )
    for pattern, group in case.groups.items():
        distinct = [gradients[name] for name in fnmatch.filter(gradients, pattern)]
        squares = [reference.power_sum(gradient, 2.0) for gradient in distinct]
        of_group = torch.stack(squares).sum()
        dist.all_reduce(of_group, group=group)
        total += float(of_group)
    return reference.root(total, 2.0)


def _largest(gradients: dict[str, Tensor]) -> float:
    values = [gradient.abs().max() for gradient in gradients.values() if gradient.numel()]
    largest = torch.stack(values).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _off(model: nn.Module, truth: Truth, returned: float | None) -> tuple[Off, Off]:
    """Return how far this rank's norm is off, and the gradient that is furthest off."""
    norm = Off(0.0)
    if returned is not None:
        error = abs(returned / truth.norm - 1.0)
        norm = Off(_finite(error), "norm", returned, truth.norm)
    worst = Off(0.0)
    for name, gradient in _gradients(model).items():
        expected = truth.gradients[name]
        size = reference.total_norm([expected])
        error = reference.total_norm([gradient - expected])
        if size:
            error /= size
        if _finite(error) > worst.error:
            measured = reference.total_norm([gradient])
            worst = Off(_finite(error), f"‖{name}‖", measured, size)
    return norm, worst


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def markdown(measured: Sequence[Row], date: str) -> str:
    """Return a table for each mode: a row for each layout, a column for each tool."""
    versions = ", ".join(f"{tool} {number}" for tool, number in installed().items())
    lines = [f"Measured on {date[:10]} with {versions}."]
    for mode in dict.fromkeys(row["mode"] for row in measured):
        of_mode = [row for row in measured if row["mode"] == mode]
        applies = {row["tool"] for row in of_mode if row["verdict"] != "not applicable"}
        tools = [tool for tool in TOOLS if tool in applies]
        lines += ["", f"| {mode} | {' | '.join(tools)} |", "|---" * (len(tools) + 1) + "|"]
        by_place = {(row["layout"], row["tool"]): row for row in of_mode}
        messages: list[str] = []
        for layout in dict.fromkeys(row["layout"] for row in of_mode):
            columns = [_entry(by_place[layout, tool], messages) for tool in tools]
            lines.append(f"| {layout} | {' | '.join(columns)} |")
        if messages:
            lines.append("")
        for number, message in enumerate(messages, 1):
            lines.append(f"* ({number}) `{message}`")
    return "\n".join(lines) + "\n"


def _entry(row: Row, messages: list[str]) -> str:
    """Return the text of a cell; what it raises is added to ``messages``, and numbered."""
    if row["verdict"] == "right":
        return "right"
    if row["verdict"] == "raises":
        if row["detail"] not in messages:
            messages.append(row["detail"])
        return f"raises ({messages.index(row['detail']) + 1})"
    return f"**off** {row['detail']}"
