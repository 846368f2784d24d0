"""Build the objects of a run from its checked configuration.

Model, data, optimizer and scheduler can be any class or function, named by ``_target_``. The
functions here add the arguments that a configuration cannot hold: parameters, the optimizer,
``total_steps`` and ``fused``.
"""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer

from runner.booster import Plugin
from runner.booster.loss import Criterion
from runner.booster.plugin import PLUGINS
from runner.clip.units import head_weights
from runner.config import sizes
from runner.config.duration import Duration
from runner.config.environment import started_rank
from runner.config.schema import DataSection, LossSection, RunConfig
from runner.config.section import Target
from runner.data import Data, DataUnavailable
from runner.data.dataset import length_of
from runner.optim.muon import NoHiddenMatrix
from runner.train import progress
from runner.train.callbacks import EarlyStopping

_EXTRAS = {"timm": "clip-runner[optim]"}
"""Packages of the options of ``optimizer``, and the extra that installs each."""


class TargetError(ValueError):
    """A ``_target_`` that does not exist, or that rejects its arguments."""


def device_of(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is this rank's GPU if there is one."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    started = started_rank()
    local_rank = 0 if started is None else started.local_rank or 0
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def maker(target: Target) -> partial[Any]:
    """Return the class or function that ``target`` names, with its arguments bound."""
    try:
        made = instantiate(target.mapping(), _partial_=True, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if needed := _extra_of(cause):
            raise TargetError(f"{target.target} {needed}") from error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise TargetError(f"{target.target}: {reason}") from error
    assert isinstance(made, partial)
    return made


def _extra_of(cause: BaseException) -> str | None:
    """Return what to install, if ``cause`` is that the package of an extra is missing."""
    absent = cause.__cause__
    if not isinstance(absent, ModuleNotFoundError) or absent.name not in _EXTRAS:
        return None
    return f'needs {absent.name}, which is not installed: pip install "{_EXTRAS[absent.name]}"'


def make_data(config: DataSection) -> Data:
    """Make the data, once for each configuration: the preflight check and the run share it."""
    return _data(json.dumps(config.model_dump(by_alias=True), sort_keys=True))


@lru_cache(maxsize=2)
def _data(section: str) -> Data:
    config = DataSection.model_validate_json(section)
    target = config.target
    parts = {name: _part(name, part) for name, part in config.parts.items()}
    made = maker(config)(**parts)
    if not isinstance(made, Data):
        raise TargetError(f"{target} returned {type(made).__name__}, not a runner.data.Data")
    return made


def make_criterion(config: LossSection) -> Criterion | None:
    """Make the criterion: an object of the class that is named, or the function itself."""
    if config.target is None:
        return None
    made = maker(config)
    criterion = made() if isinstance(made.func, type) else made
    try:
        inspect.signature(getattr(criterion, "forward", criterion)).bind(None, None)
    except (TypeError, ValueError) as error:
        raise TargetError(
            f"{config.target} is no criterion, which is called with (outputs, targets): {error}"
        ) from error
    return criterion


def _part(name: str, target: Target) -> Any:
    try:
        return maker(target)()
    except DataUnavailable:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataUnavailable(f"data.{name}: {target.target} cannot be made: {reason}") from error


def make_optimizers(
    target: Target, model: nn.Module, criterion: Criterion | None = None
) -> list[Optimizer]:
    """Make the optimizers of a run, in their fused form where they have one."""
    make = maker(target)
    others = list(criterion.parameters()) if isinstance(criterion, nn.Module) else []
    if takes_model(make):
        given = {"model": model, "heads": head_weights(model), "others": others}
        make = partial(make, **{key: value for key, value in given.items() if _takes(make, key)})
    else:
        make = partial(make, [*model.parameters(), *others])
    made = None
    try:
        if _takes(make, "fused"):
            with suppress(RuntimeError):  # Not supported on this device or with these options.
                made = make(fused=True)
        if made is None:
            made = make()
    except NoHiddenMatrix as error:
        raise TargetError(str(error)) from error
    listed = list(made) if takes_model(make) and isinstance(made, list | tuple) else [made]
    if not listed or not all(isinstance(each, Optimizer) for each in listed):
        kind = type(made).__name__
        raise TargetError(f"{target.target} returned {kind}, not a torch.optim.Optimizer")
    return listed


def takes_model(make: partial[Any]) -> bool:
    """Return whether an optimizer is made from a model instead of parameters."""
    return "model" in _parameters(make)


def make_scheduler(target: Target, optimizer: Optimizer, steps: int | None) -> Any:
    """Make the scheduler of ``optimizer``, with ``steps`` as its ``total_steps`` if it has one."""
    make = maker(target)
    if not _takes(make, "total_steps"):
        return make(optimizer)
    if steps is None:
        raise TargetError(
            f"{target.target} needs the number of steps, which train.max_duration does not tell "
            "for this data (a stream has epochs of unknown length, other data may have no tokens): "
            "give train.max_duration in ba or sp, such as 500ba"
        )
    return make(optimizer, total_steps=steps)


def _takes(make: partial[Any], argument: str) -> bool:
    """Return whether ``make`` has a parameter called ``argument`` that is not bound yet."""
    return argument in _parameters(make) - make.keywords.keys()


def _parameters(make: partial[Any]) -> set[str]:
    try:
        return set(inspect.signature(make.func).parameters)
    except ValueError:  # the signature of a compiled function may be unknown
        return set()


def make_callbacks(config: RunConfig) -> list[object]:
    """Make the callbacks of a run: early stopping, if it is on, and the user's own."""
    stopping = config.early_stopping
    made: list[object] = [maker(target)() for target in config.callbacks]
    if stopping.patience is None:
        return made
    return [EarlyStopping(**stopping.model_dump()), *made]


def make_plugin(config: RunConfig) -> Plugin:
    """Make the plugin that the configuration names."""
    kind, options = plugin_of(config)
    return kind(**options)


def plugin_of(config: RunConfig) -> tuple[type[Plugin], dict[str, Any]]:
    """Return the class of the plugin, and the arguments of its constructor."""
    kind = PLUGINS[config.plugin.name]
    known = {key for each in kind.mro() for key in inspect.signature(each).parameters}
    return kind, {key: value for key, value in vars(config.plugin).items() if key in known}


def steps_of(
    config: RunConfig,
    data: Data,
    data_size: int | None = None,
    duration: Duration | None = None,
) -> int | None:
    """Return the number of optimizer steps of the run; None if it cannot be known."""
    return progress.steps_of(
        config,
        length_of(data.train),
        data_size or data_parts(config),
        tokens_per_sample=data.tokens_per_sample,
        duration=duration,
    )


def data_parts(config: RunConfig) -> int:
    """Return the data-parallel size; the world size if the ranks do not fit the sizes."""
    return sizes.data_parallel_size(config.plugin, ranks_of(config))


def ranks_of(config: RunConfig) -> int:
    """Return the world size of the run, see :func:`runner.config.sizes.ranks_of`."""
    return sizes.ranks_of(config.plugin, 0 if config.device == "cpu" else torch.cuda.device_count())
