"""Weights to start from: a file of safetensors or torch, or a folder with several such files."""

from __future__ import annotations

import fnmatch
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from runner.config.notation import first_few, plural
from runner.config.schema import SUFFIXES

SAFETENSORS = ".safetensors"


class WeightsError(ValueError):
    """Weights that are not there, cannot be read, or do not fit the model."""


class Loaded(NamedTuple):
    """What was loaded into a model.

    Attributes:
        path: the file or folder.
        tensors: number of tensors of the model that come from it, ``of`` all that the model has.
        left_out: names of the tensors of the file that ``leave_out`` left out.
        difference: what only the model, or only the file, has, in a sentence; empty if nothing.
    """

    path: Path
    tensors: int
    of: int
    left_out: tuple[str, ...]
    difference: str

    def __str__(self) -> str:
        text = f"{self.tensors} of {plural(self.of, 'tensor')} of the model come from {self.path}"
        if self.left_out:
            text += f"; left out by model.leave_out: {first_few(self.left_out, 6)}"
        return f"{text}; {self.difference}" if self.difference else text


def load_weights(
    model: nn.Module, path: Path, strict: bool = True, leave_out: Sequence[str] = ()
) -> Loaded:
    """Load weights into a model; return what was loaded, left out, and is missing.

    With a model on torch's meta device they are only compared.

    Args:
        model: the model, whose ``state_dict()`` names the tensors.
        path: a file of safetensors or of ``torch.save``, or a folder with its shards.
        strict: refuse a tensor of the model that the file lacks, and one that the model lacks.
        leave_out: globs of names of tensors that are not loaded, such as ``head.*``.

    Raises:
        WeightsError: names or shapes differ, a pattern matches nothing, or nothing can be read.
    """
    state = model.state_dict(keep_vars=True)
    targets = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    is_meta = any(tensor.is_meta for tensor in targets.values())
    stored = read_weights(path, "meta" if is_meta else "cpu")
    for pattern in leave_out:
        if not fnmatch.filter([*stored, *targets], pattern):
            raise WeightsError(f"{pattern!r} matches no tensor of {path}, nor of the model")
    tensors = {name: tensor for name, tensor in stored.items() if not _matches(name, leave_out)}
    _require_shapes(targets, tensors, path)
    _require_equal_ties(targets, tensors, path)
    to_load = {name: tensor for name, tensor in tensors.items() if name in targets}
    difference = _difference(targets, tensors, leave_out, path)
    if tensors and not to_load:
        raise WeightsError(f"{path} has no tensor of this model: {difference}")
    if difference and strict:
        raise WeightsError(f"{difference}. model.strict=false starts all the same")
    if not is_meta:
        model.load_state_dict(to_load, strict=False)
    left_out = tuple(name for name in stored if name not in tensors)
    return Loaded(path, len(to_load), len(targets), left_out, difference)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def read_weights(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of a file, or of all files of a folder, without running code in them."""
    files = _files_of(path)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= _tensors_of(file, device)
        except WeightsError:
            if len(files) == 1:
                raise
        except Exception as error:  # what pickle raises depends on the content
            reason = " ".join(str(error).split())[:200]
            if "weights_only" in reason:  # torch advises to run what is in the file
                reason = "it holds something else than tensors, or is no such file"
            raise WeightsError(f"{file} cannot be read as weights: {reason}") from error
    if not tensors:
        raise WeightsError(f"{path} holds no tensors by name: save model.state_dict()")
    return tensors


def _files_of(path: Path) -> list[Path]:
    """Return a file, or the files of weights in a folder."""
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise WeightsError(f"there is no file or folder {path}")
    files = sorted(path.glob(f"*{SAFETENSORS}"))
    if not files:
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise WeightsError(f"{path} holds no file of weights ({', '.join(SUFFIXES)})")
    return files


def _tensors_of(file: Path, device: str) -> dict[str, Tensor]:
    if file.suffix == SAFETENSORS:
        return _shapes_of(file) if device == "meta" else safetensors.torch.load_file(file)
    with warnings.catch_warnings(action="ignore"):  # of files of other programs
        content = torch.load(file, map_location=device, weights_only=True)
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise WeightsError(f"{file} holds a {type(content).__name__}, no state dict")
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{file} holds no tensors by name: save model.state_dict()")
    return tensors


def _shapes_of(file: Path) -> dict[str, Tensor]:
    """Return tensors on the meta device with the names and shapes of a file."""
    with safetensors.safe_open(file, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _require_shapes(
    targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path
) -> None:
    wrong = []
    for name, tensor in tensors.items():
        if name in targets and targets[name].shape != tensor.shape:
            wrong.append(f"{name} {list(tensor.shape)} for {list(targets[name].shape)}")
    if wrong:
        raise WeightsError(
            f"{path} has other shapes than the model: {first_few(wrong, 4)}. model.leave_out "
            "leaves tensors out, by patterns of their names"
        )


def _require_equal_ties(
    targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path
) -> None:
    """Refuse two values for one parameter of the model that has two names."""
    names: dict[int, str] = {}
    for name, target in targets.items():
        if name in tensors:
            first = names.setdefault(id(target), name)
            is_meta = tensors[name].is_meta
            if first != name and not is_meta and not torch.equal(tensors[first], tensors[name]):
                raise WeightsError(
                    f"{first} and {name} are one parameter of the model, and differ in {path}: "
                    "leave one of them out by model.leave_out"
                )


def _difference(
    targets: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    leave_out: Sequence[str],
    path: Path,
) -> str:
    """Return which tensors only the model, and only the file, has; empty if both have all."""
    # A tied tensor is loaded if the file has one of its names.
    loaded = {id(target) for name, target in targets.items() if name in tensors}
    missing = []
    for name, target in targets.items():
        if id(target) not in loaded and not _matches(name, leave_out):
            missing.append(name)
    left_over = [name for name in tensors if name not in targets]
    sentences = []
    if missing:
        count = plural(len(missing), "tensor")
        sentences.append(f"{path} lacks {count} of the model: {first_few(missing, 6)}")
    if left_over:
        count = plural(len(left_over), "tensor")
        sentences.append(f"the model lacks {count} of {path}: {first_few(left_over, 6)}")
    return "; ".join(sentences)
