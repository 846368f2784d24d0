"""Write the weights of a checkpoint as one file that a plain model loads. No ranks are needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from runner.booster.saved import OPTIMIZER
from runner.checkpoint import folder
from runner.parallel.sharded_files import Folder
from runner.run_folder import files
from runner.run_folder.strict_json import replacing

Format = Literal["safetensors", "torch"]


class NoCheckpoint(ValueError):
    """A run has no checkpoint, or not the one that is asked for; the message lists what it has."""


def choose(
    run: Path, which: str | None, objective: str, maximizes: bool
) -> tuple[Path, dict[str, Any]]:
    """Find a checkpoint of a run, and check that it is whole."""
    saved = run / files.CHECKPOINTS
    final, listed = saved / files.FINAL, folder.found(saved)
    chosen: Path | None
    if which == files.FINAL or (which is None and final.is_dir()):
        chosen = final if final.is_dir() else None
    elif which is None or which == "last":
        for checkpoint, manifest in folder.whole(saved):
            return checkpoint, manifest
        chosen = listed[0] if listed else None
    elif which == "best":
        chosen = folder.best_of(listed, objective, maximizes)
    else:
        chosen = next((one for one in listed if folder.step_of(one) == int(which)), None)
    if chosen is None:
        raise NoCheckpoint(_absent(which, listed, final, objective))
    return chosen, folder.require_whole(chosen)


def _absent(which: str | None, listed: list[Path], final: Path, objective: str) -> str:
    held = [str(folder.step_of(one)) for one in reversed(listed)]
    held += [files.FINAL] if final.is_dir() else []
    if not held:
        return f"holds no checkpoint ({final.parent.name}/)"
    of = f" with {objective}" if which == "best" else ""
    return f"has no checkpoint {which}{of}  (there are: {', '.join(held)})"


def whole_model(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the state dict of the whole model, on the host."""
    source, others = Folder(checkpoint), set(manifest.get("criterion", ()))
    model: dict[str, Tensor] = {
        name: torch.empty(one.shape, dtype=one.dtype)
        for name, one in source.stored.items()
        if not name.startswith(OPTIMIZER) and name not in others
    }
    source.read({name: [tensor] for name, tensor in model.items()})
    return model | {name: model[first] for name, first in manifest.get("tied", {}).items()}


def write(
    model: Mapping[str, Tensor], file: Path, form: Format, metadata: Mapping[str, str]
) -> None:
    """Write a state dict to a file, which gets its name when it is complete."""
    with replacing(file) as part:
        try:
            if form == "torch":
                torch.save(dict(model), part)
            else:
                safetensors.torch.save_file(_apart(model), part, {"format": "pt", **metadata})
        except (RuntimeError, safetensors.SafetensorError) as error:  # a full disk, for example
            raise OSError(str(error)) from error


def _apart(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tied tensors: safetensors has none, and refuses to write shared memory."""
    known: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in model.items():
        own[name] = tensor.clone() if id(tensor) in known else tensor
        known.add(id(tensor))
    return own
