"""``torch.compile`` of a model, or of its blocks one by one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.parallel.recompute import blocks_of

COMPILERS = ("g++", "clang++")
"""Programs that ``inductor`` calls for a CPU, if the variable CXX names none."""


def compile_in_place(model: nn.Module, blocks: bool, **options: Any) -> None:
    """Compile a model, or its blocks, when they are called first; names of parameters stay.

    Call it before ``boost``, and after :func:`checkpoint_activations`.

    Args:
        model: the model.
        blocks: whether to compile its blocks one by one, in less time, as they are alike.
        options: options of :func:`torch.compile`.

    Raises:
        ValueError: the model has no blocks.
    """
    modules = blocks_of(model) if blocks else [model]
    for module in modules:
        module.compile(**options)


def wrong_option(options: Mapping[str, Any], on_cpu: bool) -> tuple[str, str] | None:
    """Return the option that :func:`torch.compile` does not take here, and why; None if all fit."""
    backend = options["backend"]
    backends = torch.compiler.list_backends(exclude_tags=None)
    if backend not in backends:
        return "backend", f"is no backend of torch.compile: use one of {', '.join(backends)}"
    programs = (os.environ.get("CXX", ""), *COMPILERS)
    has_compiler = any(shutil.which(program) for program in programs)
    if backend == "inductor" and on_cpu and not has_compiler:
        return "backend", "needs a C++ compiler for a CPU (apt-get install g++), or use aot_eager"
    try:
        torch.compile(nn.Identity(), **options)
    except RuntimeError as error:
        return "mode", str(error).partition("\n")[0]
    return None
