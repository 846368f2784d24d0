"""The sections of a configuration: the type, the range and the meaning of each key.

Sections ``plugin`` and ``clip`` have modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runner.config.clip_section import Clip
from runner.config.modes import NAMES
from runner.config.notation import higher_is_better
from runner.config.plugin_section import PluginSection
from runner.config.section import (
    Conflict,
    Count,
    DottedName,
    DurationText,
    FolderName,
    IntervalText,
    Metrics,
    Natural,
    OneOf,
    Positive,
    Section,
    Target,
    Text,
    Texts,
    option_of,
)


class Accumulation(Section):
    """How many microbatches make one optimizer step."""

    steps: int = Field(
        ge=1, description="microbatches of one optimizer step; raise it if a batch does not fit"
    )


class Precision(Section):
    """Data type of the forward pass."""

    name: Literal["fp32", "bf16", "fp16"] = Field(
        description="choose the data type of the forward pass"
    )
    initial_scale: float = Field(
        gt=0, description="fp16: first loss scale; lower it if the first steps are skipped"
    )
    growth_interval: int = Field(
        ge=1, description="fp16: double the loss scale after this many finite steps in a row"
    )


WHOLE_PARAMETERS = ("torch.optim.Adafactor",)
"""Optimizers of ``conf/optimizer`` that cannot step a parameter of which a rank holds a shard."""

OWN_DATA = "runner.data.dataset.own"
"""The ``_target_`` of data whose parts are named by ``data.train`` and ``data.eval``."""


class DataSection(Target):
    """The data and how it is read; further keys are arguments of ``_target_``."""

    batch_size: int = Field(
        ge=1,
        description="samples in a microbatch of a data-parallel rank; lower it if out of memory",
    )
    num_workers: int = Field(
        ge=0, description="processes that read ahead; raise it if training waits for data; 0: none"
    )
    drop_last: bool = Field(
        description="leave out the last microbatch of an epoch if it is shorter"
    )

    @property
    def parts(self) -> dict[str, Target]:
        """The targets in ``train`` and ``eval``, by these names; of :data:`OWN_DATA` alone."""
        given = self.model_extra or {}
        if self.target != OWN_DATA:
            return {}
        return {
            name: Target.model_validate(given[name])
            for name in ("train", "eval")
            if isinstance(given.get(name), Mapping) and given[name].get("_target_") is not None
        }

    def mapping(self) -> dict[str, Any]:
        """Return what `hydra.utils.instantiate` takes, without the targets in it."""
        plain = super().mapping()
        if self.target != OWN_DATA:
            return plain
        return {name: value for name, value in plain.items() if name not in ("train", "eval")}

    @model_validator(mode="before")
    @classmethod
    def _own(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "train" not in given or "_target_" in given:
            return given
        return {**given, "_target_": OWN_DATA}


class LossSection(Target):
    """How a batch becomes a loss; further keys are arguments of ``_target_``."""

    target: DottedName | None = Field(  # type: ignore[assignment]
        default=None,
        alias="_target_",
        description="import this criterion of (outputs, targets); null: the model's own loss, or "
        "cross entropy over the last dimension of its outputs",
    )


class Tracker(Section):
    """Where a run is shown besides its own folder."""

    name: Annotated[str, option_of("tracker")] = Field(description="choose the tracker")
    also: list[Literal["tensorboard", "wandb"]] = Field(
        description="record with these trackers too, such as [tensorboard]"
    )
    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        description="auto: online where a key is configured, else offline for `wandb sync`"
    )
    project: Text = Field(description="file runs under this project")
    group: Text | None = Field(description="group runs by this name; null: by their sweep")
    tags: Texts = Field(description="tag runs, to find them again")
    job_type: Text = Field(description="say what kind of run this is, such as train")
    timeout: float = Field(
        gt=0,
        description="wait at most so many seconds at the end until wandb has recorded the run",
    )

    def uses(self, tracker: str) -> bool:
        """Return whether the run is recorded with ``tracker``."""
        return tracker in (self.name, *self.also)


class Train(Section):
    """How long to train."""

    max_duration: DurationText = Field(description="train this long, such as 3ep or 500ba")


class Eval(Section):
    """When to evaluate on held-out data."""

    interval: DurationText = Field(
        description="evaluate this often; raise it if evaluation takes long"
    )
    # With a default: files of users, and runs recorded earlier, lack it.
    metrics: Metrics = Field(
        default=[],
        description="log further metrics of held-out data, by their names in torchmetrics or by a "
        "_target_: [f1,auroc]; each is logged under its name",
    )


class EarlyStop(Section):
    """When a training whose metric does not improve ends before its duration."""

    patience: Count | None = Field(
        description="end after so many evaluations in a row without an improvement; null: never"
    )
    metric: Text = Field(description="watch this metric of evaluations")
    min_delta: float = Field(
        ge=0, description="count as an improvement only what is better by this much"
    )
    direction: Literal["minimize", "maximize"] | None = Field(
        description="say which metric is better; null: the lower, of an accuracy the higher"
    )


class Log(Section):
    """When metrics are logged."""

    interval: int = Field(ge=1, description="log a row of metrics every so many optimizer steps")
    flush: int = Field(
        ge=1, description="copy metrics from the device every so many optimizer steps"
    )


class Checkpoint(Section):
    """When a run saves what it needs to continue, and the weights of its end."""

    interval: IntervalText | None = Field(
        description="save a checkpoint this often, such as 500ba or 10min; null: only when the run "
        "is asked to stop"
    )
    keep: Natural = Field(
        description="keep this many newest checkpoints; lower it if the disk is small; 0: save none"
    )
    keep_best: bool = Field(description="keep one more, that with the best sweep.objective so far")
    save_final: bool = Field(description="save the weights of the end in checkpoints/final")
    asynchronous: Literal["auto"] | bool = Field(
        description="train on while files are written, from a copy in host memory; auto: on "
        "accelerators"
    )


class Telemetry(Section):
    """What is measured besides the usual metrics."""

    per_layer: bool = Field(
        description="log the gradient norm of each parameter, to find the layer that spikes"
    )
    # With defaults: runs that were recorded earlier lack them.
    worst_layers: Natural = Field(
        default=0,
        description="log the shares of ‖G‖² of so many parameters, those with the largest; 0: none",
    )
    update_ratio: bool = Field(
        default=False,
        description="log the norm of each update over that of the weights; a copy of the weights",
    )
    clip_cosine: bool = Field(
        default=False,
        description="log the cosine between the gradient before and after clipping; modes that "
        "clip elements or units need a copy of the gradient",
    )
    noise_scale: bool = Field(
        default=False,
        description="estimate the gradient noise scale from microbatches and data-parallel ranks",
    )
    spike_score: bool = Field(
        default=False, description="log the shares of steps whose loss, or norm, is a spike"
    )
    spike_sigma: float = Field(
        default=6.0,
        gt=0,
        description="a spike is more standard deviations than this away from the rolling mean",
    )
    spike_window: int = Field(
        default=128, ge=4, description="take the rolling mean over so many steps before"
    )
    probe: int = Field(
        ge=0, description="print this many elements of the first parameter after each microbatch"
    )

    def conflicts_with(
        self, plugin: PluginSection, clip: Clip, microbatches: int
    ) -> Iterator[Conflict]:
        """Yield measurements that are not possible beside other sections."""
        if self.worst_layers and clip.norm_type == math.inf:
            message = "needs a norm that parameters have a share of: clip.norm_type=2, not inf"
            yield Conflict("worst_layers", message)
        if not self.noise_scale:
            return
        if {plugin.tp_size, plugin.pp_size, plugin.ep_size} != {1}:
            message = (
                "needs ranks that have the whole gradient of their samples: plugin=single, ddp, "
                f"fsdp or zero, not plugin={plugin.name}"
            )
            yield Conflict("noise_scale", message)
        elif plugin.name == "single" and microbatches == 1:
            message = (
                "compares parts of a batch, and this run has one: accumulation.steps=2 or more, or "
                "plugin=ddp"
            )
            yield Conflict("noise_scale", message)


class Launch(Section):
    """How ranks are started."""

    timeout: float = Field(
        gt=0,
        description="end the run if a collective takes more seconds; raise it for slow networks",
    )
    max_restarts: Natural = Field(
        description="if a rank fails, start all again from the last checkpoint, at most so often"
    )


class Shutdown(Section):
    """How a run ends when a signal asks it to stop."""

    timeout: float = Field(
        gt=0,
        description="end a run that was asked to stop after so many seconds; raise it if a step "
        "and a checkpoint take longer",
    )


class Resume(Section):
    """Whether a run continues from a checkpoint."""

    source: Text = Field(
        alias="from",
        description="continue from a checkpoint: auto for what the folder of this run holds, "
        "never, or the path of a run or a checkpoint",
    )
    force: bool = Field(
        description="continue though the checkpoint is that of another configuration; rates and "
        "other settings are those of this run"
    )


class SweepSection(Section):
    """A sweep: several runs of one command."""

    name: FolderName | None = Field(
        description="name the folder, to find or continue it; null: named after what varies"
    )
    objective: Text = Field(description="compare runs by the best value of this metric")
    direction: Literal["minimize", "maximize"] | None = Field(
        description="say which objective is better; null: the lower, of an accuracy the higher"
    )
    max_failures: Natural | None = Field(
        description="stop after more failed runs than this; null: never"
    )
    max_jobs: Count = Field(
        description="refuse a sweep of more runs, such as that of range(0,1e9); raise it for more"
    )
    zip: Texts = Field(
        description="advance the lists of these keys together, not as a product; unset in such a "
        "list leaves its key out"
    )

    @property
    def maximizes(self) -> bool:
        """Whether a higher objective is better."""
        if self.direction is None:
            return higher_is_better(self.objective)
        return self.direction == "maximize"


class Report(Section):
    """The page of a run or a sweep."""

    baseline: Text | Natural | None = Field(
        description="compare the other settings of a sweep with this one: its name in the table, "
        "such as none, or the number of one of its runs; null: with the best one"
    )


class Calibrate(Section):
    """``python -m runner calibrate``; a run does not use it."""

    steps: int = Field(ge=2, description="measure this many optimizer steps without clipping")
    warmup_steps: Natural | None = Field(
        description="describe so many first steps separately; null: a tenth"
    )
    output: Text | None = Field(
        description="write to this folder; null: a new one in outputs/calibrations"
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield a warm-up as long as the whole calibration."""
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            yield Conflict("warmup_steps", f"must leave some of calibrate.steps={self.steps}")


class Verify(Section):
    """``python -m runner verify``; a run does not use it."""

    steps: int = Field(ge=1, description="compare this many optimizer steps")
    dtype: Literal["float64", "float32"] = Field(
        description="compute both sides in this type; float64 shows the smallest errors"
    )
    tolerance: Positive | None = Field(
        description="accept relative errors up to this; null: 1e-9 in float64, 1e-5 in float32"
    )
    lr: float = Field(gt=0, description="take the steps of both sides by plain SGD at this rate")
    modes: Annotated[list[Annotated[str, OneOf(NAMES)]], Field(min_length=1)] | None = Field(
        description="compare these clipping modes, such as [norm,value]; null: the chosen one"
    )

    @property
    def bound(self) -> float:
        """The largest relative error that counts as rounding."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-9 if self.dtype == "float64" else 1e-5
