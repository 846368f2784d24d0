"""Model, mode and optimizer of both sides, and where they differ from those of the run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from runner.booster.batch import mapped
from runner.booster.criterion import Criterion
from runner.booster.loss import WindowLoss
from runner.clip import ClipMode
from runner.clip import build as build_mode
from runner.clip.mode import NEVER
from runner.config.modes import ModeInfo, built_in
from runner.config.schema import RunConfig
from runner.data.dataset import collate_pairs, first_sample, length_of
from runner.parallel.first_rank import on_first
from runner.train import build


def collate(samples: Any, dtype: torch.dtype) -> Any:
    """Collate samples to a batch, and convert its floating-point tensors to ``dtype``."""
    batch = collate_pairs(samples)
    return mapped(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def samples(config: RunConfig, parts: int) -> Dataset[Any]:
    """Return the training data of both sides; every rank has to call this."""
    data: Dataset[Any] = build.make_data(config.data).train
    if length_of(data) is not None:
        return data
    stream: Any = data
    microbatches = config.verify.steps * config.accumulation.steps * parts
    first: Any = on_first(lambda: list(islice(stream, microbatches * config.data.batch_size)))
    return first  # type: ignore[no-any-return]


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of both sides."""
    return torch.float64 if config.verify.dtype == "float64" else torch.float32


def make_model(config: RunConfig) -> tuple[nn.Module, int]:
    """Make the model of the run in ``verify.dtype``, with the same weights on every rank."""
    torch.manual_seed(config.seed)
    model = build.maker(config.model)().to(build.device_of(config.device), dtype_of(config))
    assert isinstance(model, nn.Module)
    return model, switch_off_dropout(model)


def make_criterion(config: RunConfig) -> Criterion | None:
    """Make the criterion of the run, if it names one, in ``verify.dtype``."""
    criterion = build.make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(build.device_of(config.device), dtype_of(config))
    return criterion


def make_mode(config: RunConfig, name: str) -> tuple[ClipMode, bool]:
    """Make a clipping mode; also return True if its threshold is still to be derived."""
    chosen = config.clip
    if name == chosen.mode:
        return build_mode(chosen.kind, **chosen.options), False
    described = built_in(name)
    info = described.info
    # A mode that needs the optimizer has nothing to compare with in the first step.
    known = info.needs_optimizer or "threshold" in described.at_once
    derived = info.takes_threshold and not known
    threshold = NEVER if derived else info.published[0][0] if info.needs_optimizer else None
    options = {"threshold": threshold, "norm_type": chosen.norm_type}
    return build_mode(name, **{**options, **described.at_once}), derived


def make_optimizer(
    config: RunConfig, model: nn.Module, criterion: Criterion | None, mode: ClipMode
) -> torch.optim.Optimizer:
    """Make plain SGD, because the steps of Adam and similar optimizers hide a wrong scale."""
    trained = [*model.parameters()]
    if isinstance(criterion, nn.Module):
        trained += criterion.parameters()
    parameters = dict.fromkeys(trained)
    if mode.info.needs_optimizer:
        return torch.optim.AdamW(parameters, lr=config.verify.lr / 10, eps=1e-3)
    return torch.optim.SGD(parameters, lr=config.verify.lr)


def comparable(config: RunConfig) -> RunConfig:
    """Return ``config`` without settings that round on the plugin's side only."""
    plugin = config.plugin.model_copy(update={"param_dtype": None})
    return config.model_copy(update={"plugin": plugin})


def notes(config: RunConfig, dropped: int = 0) -> Iterator[str]:
    """Yield how both sides differ from a run of ``config``."""
    verify = config.verify
    optimizer = config.optimizer.target.rpartition(".")[2]
    plain = config.optimizer.mapping() == {"_target_": "torch.optim.SGD", "lr": verify.lr}
    steps = f"plain SGD at a constant rate of {verify.lr:g}"
    if any(info.needs_optimizer for info in _infos(config)):
        steps += f" (by AdamW at {verify.lr / 10:g} where the mode needs the optimizer)"
    if not plain or not config.scheduler.target.endswith(".ConstantLR"):
        yield (
            f"both sides step by {steps} instead of {optimizer} and its schedule: adaptive steps "
            "hide a gradient of the wrong scale"
        )
    if config.precision.name != "fp32":
        yield f"everything is computed in {verify.dtype}, not in {config.precision.name}"
    if config.plugin.param_dtype is not None:
        yield f"parameters are gathered in {verify.dtype}, not in {config.plugin.param_dtype}"
    if dropped:
        yield f"dropout is off, in {dropped} places: ranks would drop other elements"


def _infos(config: RunConfig) -> Iterator[ModeInfo]:
    """Yield the facts about the modes that are compared."""
    for name in config.verify.modes or [config.clip.mode]:
        yield config.clip.described.info if name == config.clip.mode else built_in(name).info


def needs_float32(config: RunConfig) -> bool:
    """Return True if the model goes forward on two samples in float32, but not in float64."""
    return _forward_works(config, "float32") and not _forward_works(config, "float64")


def _forward_works(config: RunConfig, dtype: Literal["float32", "float64"]) -> bool:
    verify = config.verify.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"verify": verify})
    try:
        model, _ = make_model(config)
        sample = first_sample(build.make_data(config.data).train)
        batch = collate([sample, sample], dtype_of(config))
        batch = mapped(batch, lambda t: t.to(build.device_of(config.device)))
        with torch.no_grad():
            WindowLoss(model, make_criterion(config)).forward(model, batch)
    except Exception:
        return False
    return True


def switch_off_dropout(model: nn.Module) -> int:
    """Set all dropout probabilities to 0, because ranks draw other elements than one process."""
    found = 0
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in list(vars(module).items()):
            is_chance = isinstance(value, int | float) and not isinstance(value, bool)
            named = "drop" in name.lower() or (drops and name in ("p", "prob"))
            if is_chance and named and 0 < value <= 1:
                setattr(module, name, 0.0)
                found += 1
    return found
