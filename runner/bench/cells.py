"""One cell of the table of tools: a call on a layout of four ranks, compared with float64.

    python -m runner.bench.cells REQUEST ROWS

measures the cells of a request in whatever environment this Python belongs to, and adds a line of
JSON to a file for each one. A call that hangs ends the ranks, and others go on with the next cell.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from runner.bench.clip_calls import clips_of, versions
from runner.bench.layouts import LAYOUTS, RANKS, Case
from runner.check import reference
from runner.config.notation import ranks_as_text
from runner.gradients.shard import is_dtensor

Row = dict[str, Any]
MODES = ("norm", "value", "adaptive")
_ADAPTIVE = 0.01  # λ of adaptive
_EPS = 1e-3
_TOLERANCES = {torch.bfloat16: 2**-7}  # of a gradient, as a share of the right one
_TOLERANCE = 1e-4
_WORDS = 9  # of a message that is shown


HANGS = "hangs"
ABSENT = "not run here"
# What gloo says of a rank that waits too long, and of those that wait for it.
_TIMED_OUT = re.compile(r"[Tt]imed out|Connection closed by peer")
_NEEDS_DEVICE = re.compile(r"CUDA|NVIDIA driver|no accelerator")


class Place(NamedTuple):
    """Where a cell stands in the table."""

    layout: str
    mode: str
    tool: str


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


def cells(layouts: Iterable[str], tools: Sequence[str], modes: Sequence[str]) -> list[Row]:
    """Measure cells; every rank of four calls this, and has the same rows."""
    rows: list[Row] = []
    for place in places(layouts, tools, modes):
        rows.append(cell(place))
        if rows[-1]["verdict"] == HANGS:
            break  # the process group is broken
    return rows


def places(layouts: Iterable[str], tools: Sequence[str], modes: Sequence[str]) -> list[Place]:
    """Return the cells of a table in the order in which they are measured."""
    return [Place(layout, mode, tool) for layout in layouts for mode in modes for tool in tools]


def cell(place: Place, messages: dist.ProcessGroup | None = None) -> Row:
    """Measure one cell; a collective of four ranks.

    ``messages`` is a process group that a tool which hangs in the default one leaves as it is.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        return _cell(place, messages)


def _cell(place: Place, messages: dist.ProcessGroup | None) -> Row:
    case = LAYOUTS[place.layout]()
    row = {**place._asdict(), "version": versions()[place.tool]}
    try:
        clip = clips_of(place.tool, case.model).get(place.mode)
    except Exception as error:  # of any kind: the tool needs something that is not here
        return finished(row, ABSENT, _first_words(_text_of(error)))
    if clip is None:
        return finished(row, "not applicable", "")
    truth = _truth(case, place.mode)
    problem = None
    returned: float | None = None
    try:
        returned = _number(clip(truth.limit, case.groups))
    except Exception as error:  # of any kind: the cell shows it
        problem = _text_of(error)
    problems = _gathered(problem, messages)
    texts = [text for text in problems if text is not None]
    if texts:
        return _failed(row, problems, texts)
    everywhere = _gathered(_off(case.model, truth, returned), messages)
    dtype = next(case.model.parameters()).dtype
    tolerance = _TOLERANCES.get(dtype, _TOLERANCE)
    worst = max((off for offs in everywhere for off in offs), key=lambda off: off.error)
    row["error"] = worst.error
    wrong_norms = [offs[0] for offs in everywhere if offs[0].error > tolerance]
    if wrong_norms:  # which explains gradients that are wrong
        worst = max(wrong_norms, key=lambda off: off.error)
    if worst.error <= tolerance:
        return finished(row, "right", f"{worst.error:.0e}")
    row |= {"measured": worst.measured, "expected": worst.expected}
    ratio = worst.measured / worst.expected
    text = f"×{ratio:.3g} ({worst.what} {worst.measured:.4g} for {worst.expected:.4g})"
    return finished(row, "off", text)


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _failed(row: Row, problems: Sequence[str | None], texts: Sequence[str]) -> Row:
    """Return the row of a call that raised on some ranks, or waited until the time was over."""
    if any(_TIMED_OUT.search(text) for text in texts):
        waiting = [rank for rank, text in enumerate(problems) if text is not None]
        detail = f"{ranks_as_text(waiting)} wait{'s' if len(waiting) == 1 else ''} in a collective"
        others = [rank for rank, text in enumerate(problems) if text is None]
        if others:
            detail += f", {ranks_as_text(others)} {'has' if len(others) == 1 else 'have'} left"
        return finished(row, HANGS, detail)
    verdict = ABSENT if _NEEDS_DEVICE.search(texts[0]) else "raises"
    return finished(row, verdict, _first_words(texts[0]))


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_words(text: str) -> str:
    words = text.split()
    ending = " ..." if len(words) > _WORDS else ""
    return " ".join(words[:_WORDS]) + ending


def finished(row: Row, verdict: str, detail: str) -> Row:
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


@dataclass(frozen=True)
class Request:
    """What :func:`main` is asked for: cells, the file of rows, and seconds that a call may take."""

    places: list[Place]
    file: Path
    seconds: float


def _rank(number: int, store: str, request: Request) -> None:
    """Measure cells on one rank; rank 0 writes a line for each."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=request.seconds)
    address = f"file://{store}"
    dist.init_process_group("gloo", address, rank=number, world_size=RANKS, timeout=limit)
    # Ranks that have left a call wait here for those that hang in it.
    messages: Any = dist.new_group(backend="gloo", timeout=10 * limit)
    for place in request.places:
        row = cell(place, messages)
        if number == 0:
            with request.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if row["verdict"] == HANGS:
            os._exit(0)  # the process group is broken: there is nothing to tear down
    dist.destroy_process_group()


def main(words: Sequence[str]) -> None:
    """Measure the cells of the request in the file ``words[0]``; rows go to ``words[1]``."""
    asked = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    request = Request(
        places=[Place(*place) for place in asked["places"]],
        file=Path(words[1]),
        seconds=asked["seconds"],
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", request)
        start_processes: Any = multiprocessing.start_processes  # type: ignore[attr-defined]
        start_processes(_rank, arguments, nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main(sys.argv[1:])
