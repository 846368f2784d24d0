"""Check by type, before the call, the targets that a recorded configuration names.

`runner/config/trust.py` has checked their names before: importing their modules runs no code of a
stranger. What is left is whether they are classes that make what a training consists of.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from runner.config.folders import find
from runner.config.problem import Problem
from runner.config.trust import LIBRARIES, PROJECT, Recorded

BASES = (nn.Module, Dataset, Optimizer, LRScheduler)
# Arguments by which a library runs code of others, or reads pickles.
_RUNS_CODE = {"_args_", "trust_remote_code", "code_revision", "auto_map", "use_kernels"}
_RUNS_CODE |= {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "loader"}
_READS_PICKLES = ("LSUN", "LSUNClass")
_METHODS = ("from_config", "from_pretrained", "for_model")  # of transformers' classes


def problems(recorded: Iterable[Recorded]) -> list[Problem]:
    """Return a problem for each target that may not be called."""
    return [target.problem for target in recorded if not _may_be_called(target)]


def _may_be_called(recorded: Recorded) -> bool:
    if _runs_code(recorded.arguments):
        return False
    try:
        callee = _named(recorded.target)
    except Exception:  # there is none, which is reported where it would be called
        return True
    if isinstance(callee, type):
        return _is_known(callee)
    if inspect.ismethod(callee):
        return callee.__name__ in _METHODS and _is_of_transformers(callee.__self__)
    return _is_factory(recorded, callee)


def _named(target: str) -> Any:
    """Return what a dotted name stands for, found as Hydra finds it."""
    path, *parts = target.split(".")
    callee: Any = import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        if not hasattr(callee, part):
            import_module(path)
        callee = getattr(callee, part)
    return callee


def _runs_code(arguments: Any) -> bool:
    """Return whether arguments, or mappings and lists in them, make a library run code of others.

    A mapping may become the keyword arguments of another function, as ``model_kwargs`` do.
    """
    if isinstance(arguments, list):
        return any(_runs_code(item) for item in arguments)
    if not isinstance(arguments, Mapping):
        return False
    for key, value in arguments.items():
        name = str(key)
        if name in _RUNS_CODE and value:
            return True
        # timm and transformers fetch what such names stand for.
        if name == "model_name" and ":" in str(value):
            return True
        if name.endswith("_implementation") and "/" in str(value):
            return True
        if _runs_code(value):
            return True
    return False


def _is_known(kind: type) -> bool:
    """Return whether a class is one of this project, or makes a part of a training."""
    module = f"{kind.__module__}."
    if module.startswith(PROJECT):
        return True
    if not module.startswith(LIBRARIES) or module.startswith("torch.utils.data.datapipes."):
        return False
    if kind.__name__ in _READS_PICKLES:
        return False
    is_transform = module.startswith("torchvision.transforms.")
    return issubclass(kind, _bases()) or is_transform


def _bases() -> tuple[type, ...]:
    """Return the classes that parts of a training derive from, of libraries that are imported."""
    bases: list[type] = [*BASES]
    if "timm.scheduler.scheduler" in sys.modules:
        bases.append(sys.modules["timm.scheduler.scheduler"].Scheduler)
    if "transformers" in sys.modules:
        bases.append(sys.modules["transformers"].PretrainedConfig)
    return tuple(bases)


def _is_of_transformers(kind: Any) -> bool:
    if not isinstance(kind, type) or not kind.__module__.startswith("transformers."):
        return False
    chooses = kind.__module__.startswith("transformers.models.auto.")
    return _is_known(kind) or (chooses and kind.__name__.startswith(("AutoModel", "AutoConfig")))


def _is_factory(recorded: Recorded, function: Any) -> bool:
    """Return whether a function is one that makes a part of a training, by its name."""
    target = recorded.target
    if target in _project_factories() or target == "timm.create_model":
        return True
    module = str(getattr(function, "__module__", ""))
    name = target.rpartition(".")[2]
    if target.startswith("torchvision.models.") and module.startswith("torchvision.models."):
        from torchvision.models import list_models

        return name == "get_model" or name in list_models()
    if target.startswith("torch.nn.functional."):
        # Only a loss, by one name: all of torch can be reached through this module.
        is_loss = name.endswith(("loss", "entropy", "entropy_with_logits", "kl_div"))
        return recorded.key == "loss._target_" and target.count(".") == 3 and is_loss
    if target.startswith("transformers."):
        return module == "transformers.optimization" and "_schedule" in name
    return False


@cache
def _project_factories() -> set[str]:
    """Return the functions and classes of this project that the options in ``conf/`` name."""
    text = "".join(file.read_text(encoding="utf-8") for file in find("conf").rglob("*.yaml"))
    return set(re.findall(r"_target_: (runner\.[\w.]+)", text))
