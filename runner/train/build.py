"""From a checked configuration to objects: device, data, model, optimizer, scheduler, clipping.

Model, data, optimizer and scheduler are anybody's, named by ``_target_``; what the runner adds to
their arguments (parameters, the optimizer, ``total_steps``, ``fused``) is said here.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer

from runner.booster import LossScale, Plugin
from runner.clip import ClipMode
from runner.clip import build as build_mode
from runner.config import sizes
from runner.config.duration import Duration
from runner.config.schema import DataSection, RunConfig
from runner.config.section import Target
from runner.data import Data
from runner.train.progress import total_steps


class TargetError(ValueError):
    """A ``_target_`` that does not exist, or that rejects its arguments."""


def device_of(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is the GPU of this rank where there is one.

    Asks nothing that would make a context on the GPU: the launcher of local ranks needs none.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def maker(target: Target) -> Callable[..., Any]:
    """What ``target`` names, with its arguments already given.

    Raises:
        TargetError: the name cannot be imported, or one of its arguments cannot be made.
    """
    try:
        made = instantiate(target.mapping(), _partial_=True, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise TargetError(f"{target.target}: {reason}") from error
    assert isinstance(made, partial)
    return made


def takes(make: Callable[..., Any], argument: str) -> bool:
    """Whether ``make`` has a parameter called ``argument`` that was not given yet."""
    try:
        parameters = inspect.signature(getattr(make, "func", make)).parameters
    except ValueError:
        return False
    return argument in parameters and argument not in getattr(make, "keywords", {})


def make_data(config: DataSection) -> Data:
    """The data; made once for a configuration, since the check of a request makes it too.

    Raises:
        TargetError: see :func:`maker`.
        runner.data.DataUnavailable: it is not there.
    """
    return _data(config.target, json.dumps(config.arguments, sort_keys=True))


@lru_cache(maxsize=2)
def _data(target: str, arguments: str) -> Data:
    made = maker(Target.of(target, json.loads(arguments)))()
    if not isinstance(made, Data):
        raise TargetError(f"{target} returned {type(made).__name__}, not a runner.data.Data")
    return made


def make_optimizer(target: Target, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer over ``parameters``, in its fused form where it has one.

    torch's fused steps are two to six times faster than its default ones on a CPU.

    Raises:
        TargetError: see :func:`maker`; or it returned no optimizer.
    """
    make = maker(target)
    listed = list(parameters)
    made = None
    if takes(make, "fused"):
        with suppress(RuntimeError):  # Not for this device or these options (foreach, ...).
            made = make(listed, fused=True)
    if made is None:
        made = make(listed)
    if not isinstance(made, Optimizer):
        kind = type(made).__name__
        raise TargetError(f"{target.target} returned {kind}, not a torch.optim.Optimizer")
    return made


def make_scheduler(target: Target, optimizer: Optimizer, steps: int | None) -> Any:
    """The scheduler of ``optimizer``; ``steps`` is handed on to one that takes ``total_steps``.

    Raises:
        TargetError: it needs ``total_steps``, and the duration does not tell.
    """
    make = maker(target)
    if not takes(make, "total_steps"):
        return make(optimizer)
    if steps is None:
        raise TargetError(
            f"{target.target} needs the number of steps, which a duration in tokens does not tell "
            "for this data: give train.max_duration in ep, ba or sp"
        )
    return make(optimizer, total_steps=steps)


def make_mode(config: RunConfig) -> ClipMode:
    """The clipping mode."""
    clip = config.clip
    return build_mode(
        clip.mode,
        threshold=clip.threshold,
        norm_type=clip.norm_type,
        exclude=clip.exclude if isinstance(clip.exclude, str) else tuple(clip.exclude),
        eps=clip.eps,
        units=clip.units or {},
    )


def make_loss_scale(config: RunConfig) -> LossScale | None:
    """The fp16 loss scale, or None."""
    if config.precision.name != "fp16":
        return None
    precision = config.precision
    return LossScale(precision.initial_scale, precision.growth_interval)


def make_plugin(config: RunConfig) -> Plugin:
    """The plugin: ``PLUGIN`` of the file ``runner/booster/plugin/<name>.py``.

    Its constructor is given the keys of the section that it knows; a size that is left open is
    None, for the plugin to fill with the ranks that stand.
    """
    kind, options = plugin_of(config)
    return kind(**options)


def plugin_of(config: RunConfig) -> tuple[type[Plugin], dict[str, Any]]:
    """The class of the plugin, and the arguments of its constructor."""
    kind: type[Plugin] = import_module(f"runner.booster.plugin.{config.plugin.name}").PLUGIN
    known = inspect.signature(kind).parameters
    return kind, {key: value for key, value in vars(config.plugin).items() if key in known}


def steps_of(
    config: RunConfig,
    data: Data,
    data_size: int | None = None,
    duration: Duration | None = None,
) -> int | None:
    """Return the optimizer steps of the whole run; None if the duration does not tell.

    Args:
        config: the whole configuration.
        data: the data set of ``config``.
        data_size: number of data-parallel ranks; by default that of ``config``. Ranks of one tensor
            or pipeline group read the same samples and count once.
        duration: duration to count instead of that of the whole run.
    """
    microbatch = config.data.batch_size * (data_size or data_parts(config))
    samples = len(data.train)  # type: ignore[arg-type]
    if config.data.drop_last:
        samples -= samples % microbatch
    return total_steps(
        duration or config.train.max_duration,
        max(samples, 1),
        microbatch * config.accumulation.steps,
        data.tokens_per_sample,
    )


def data_parts(config: RunConfig) -> int:
    """Return the data-parallel size; the world size if the ranks do not fit the sizes."""
    return sizes.data_parallel_size(config.plugin, ranks_of(config))


def ranks_of(config: RunConfig) -> int:
    """Return the world size of the run, see :func:`runner.config.sizes.ranks_of`."""
    return sizes.ranks_of(config.plugin, 0 if config.device == "cpu" else torch.cuda.device_count())
