"""Whether samples go through the model, and whether a run logs what its sweep compares.

Both are known before a run starts: two samples go through the model on torch's meta device.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import default_collate

from runner.booster.batch import BatchError, targets_of
from runner.booster.loss import WindowLoss
from runner.config.folders import CONFIG_NAME, find, options
from runner.config.nearest import nearest_name, or_list
from runner.config.problem import DataMismatch, Problem
from runner.config.schema import RunConfig
from runner.data import Data
from runner.run_folder import keys
from runner.train.refused import first_line

LOGGED = (
    *(keys.EVAL_LOSS, keys.TRAIN_LOSS, keys.TRAIN_LR, keys.TRAIN_SAMPLES),
    *(keys.GRAD_NORM, keys.GRAD_NORM_CLIPPED, keys.GRAD_NORM_MEAN, keys.GRAD_NORM_MAX),
    *(keys.GRAD_NONFINITE, keys.CLIP_COEF, keys.CLIP_CLIPPED, keys.CLIP_FRACTION),
    *(keys.CLIP_RATIO, keys.CLIP_RATIO_TOTAL, keys.TIME_STEP, keys.THROUGHPUT),
    keys.WALL_SECONDS,
)
"""The metrics that every run logs."""

_COMMAND = "# python -m runner "
"""Begins the lines of an option's file that show how it is used."""


def check(config: RunConfig, model: nn.Module, data: Data) -> list[Problem]:
    """Find whether samples go through ``model`` and the sweep's objective will be logged.

    Args:
        config: the whole configuration.
        model: the model of ``config``, on the meta device.
        data: the data of ``config``.
    """
    if len(data.train) == 0:  # type: ignore[arg-type]
        return []
    shape = "of unknown shape"
    graded: bool | None = None
    try:
        samples = default_collate([data.train[0], data.train[0]])
        loss = WindowLoss(model)
        loss.items(samples)
        shape = _shape(samples)
        batch = tree_map_only(Tensor, lambda t: t.to("meta"), samples)
        with torch.device("meta"), torch.no_grad():
            outputs = loss.forward(model, batch)
            loss.sum(outputs, batch, items=1)
        targets = targets_of(samples)
        graded = False
        if isinstance(outputs, Tensor) and targets is not None and not targets.is_floating_point():
            graded = outputs.shape[:-1] == targets.shape
    except BatchError as error:
        return [Problem("data._target_", config.data.target, str(error))]
    except Exception as error:
        if not about_meta(error):
            message = f"does not take a sample of {config.data.target} ({shape}): "
            message += "; ".join([first_line(error), *_what_fits(config)])
            return [DataMismatch("model._target_", config.model.target, message)]
    return _objective(config, model, data, graded)


def _shape(samples: object) -> str:
    """Shape and type of one sample's inputs, for a person."""
    for leaf in tree_leaves(samples):
        if isinstance(leaf, Tensor):
            size = "x".join(map(str, leaf.shape[1:])) or "one number"
            return f"{size}, {str(leaf.dtype).removeprefix('torch.')}"
    return "of unknown shape"


def _objective(
    config: RunConfig, model: nn.Module, data: Data, graded: bool | None
) -> list[Problem]:
    """Find whether the run logs ``sweep.objective``.

    Args:
        config: the whole configuration.
        model: for the names of parameters.
        data: for whether there are tokens.
        graded: whether the model's outputs have an accuracy; None if that is not known.
    """
    key, clip = config.sweep.objective, config.clip
    names = [*LOGGED, *map(keys.what_if, clip.what_if)]
    if graded is not False:
        names.insert(1, keys.EVAL_ACCURACY)
    if clip.threshold is not None:
        names.append(keys.CLIP_THRESHOLD)
    if data.tokens_per_sample is not None:
        names.append(keys.TRAIN_TOKENS)
    layers = [keys.layer_norm(name) for name, _ in model.named_parameters()]
    if key in names or (config.telemetry.per_layer and key in layers):
        return []
    near = nearest_name(key, names)
    mean = "" if near is None else f"; did you mean {near}?"
    message = f"is not logged by this run{mean} (it logs {', '.join(names)})"
    return [Problem("sweep.objective", key, message)]


def _what_fits(config: RunConfig) -> Iterator[str]:
    """Say which data goes with the model, and which model with the data, of the options there are.

    Nothing where they go together: the error is then about something else, a length, say.
    """
    models = dict(_examples("model", config.model.target))
    data = dict(_examples("data", config.data.target))
    for option, commands in models.items():
        if any(_is_asked_for(words, config, data) for words in commands):
            return
        if fitting := dict.fromkeys(_about("data", words) for words in commands):
            yield f"model={option} goes with {or_list(fitting)}"
    default = re.search(r"- model: (\w+)", (find("conf") / f"{CONFIG_NAME}.yaml").read_text())
    usual = "" if default is None else f"model={default[1]}"
    for words in (words for commands in data.values() for words in commands):
        yield f"{_about('data', words)} goes with {_about('model', words) or usual}"


def _about(section: str, words: Sequence[str]) -> str:
    """The overrides of one section."""
    return " ".join(word for word in words if word.startswith((f"{section}=", f"{section}.")))


def _examples(group: str, target: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The options of ``group`` that make ``target``; of each, the overrides of its examples."""
    for option in options(group):
        text = (find("conf") / group / f"{option}.yaml").read_text()
        if f"_target_: {target}\n" in text:
            lines = [line for line in text.splitlines() if line.startswith(_COMMAND)]
            yield option, [line.removeprefix(_COMMAND).split() for line in lines]


def _is_asked_for(words: Sequence[str], config: RunConfig, data: Container[str]) -> bool:
    """Whether an example's data is that of ``config``, which is one of the options ``data``."""
    for word in words:
        key, _, value = word.partition("=")
        if key == "data" and value not in data:
            return False
        given = config.data.arguments.get(key.removeprefix("data."))
        if key in ("data.kind", "data.shape") and str(given).replace(" ", "") != value:
            return False
    return True


def about_meta(error: Exception) -> bool:
    """Return whether an error is the meta device's own: the real device may do what it cannot."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
