"""The configuration of a run: the type, the range and the meaning of each key.

Sections ``plugin`` and ``clip`` have modules of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from runner.config.accumulation import AUTO, AccumulationSteps, accumulation_value
from runner.config.clip_section import Clip
from runner.config.folders import options
from runner.config.leave_out import LeaveOut
from runner.config.modes import MODES, NAMES
from runner.config.notation import higher_is_better
from runner.config.plugin_section import PluginSection
from runner.config.section import (
    Conflicts,
    Count,
    DottedName,
    DurationText,
    FolderName,
    IntervalText,
    Natural,
    Positive,
    Section,
    StepRange,
    Target,
    Text,
    Texts,
    key,
    listed,
    not_finite,
)

Direction = Literal["minimize", "maximize"] | None
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Endings of files of weights."""


class Accumulation(Section):
    steps: Annotated[Any, PlainValidator(accumulation_value)] = key(
        "microbatches of one optimizer step; phases: {0:1,1000ba:4}; auto: as the memory allows"
    )

    @property
    def finds(self) -> bool:
        """Whether a run has to find how many microbatches of a step fit the device."""
        return bool(self.steps == AUTO)

    @property
    def phases(self) -> AccumulationSteps:
        """Microbatches of a step in each phase; one where ``auto`` has still to find them."""
        return AccumulationSteps.of(1 if self.finds else self.steps)


class Precision(Section):
    name: Literal["fp32", "bf16", "fp16"] = key("choose the data type of the forward pass")
    initial_scale: Positive = key("fp16: first loss scale; lower it if first steps are skipped")
    growth_interval: Count = key("fp16: double the scale after so many finite steps")


class Compile(Section):
    name: Literal["none", "model", "blocks"] = key("compile the model, or its blocks one by one")
    backend: Text = key("compile by this backend of torch.compile")
    mode: Text | None = key("give the backend this mode: reduce-overhead, max-autotune")
    dynamic: bool | None = key("compile for any sizes; null: after a second size was met")
    fullgraph: bool = key("refuse what cannot be compiled in one piece")

    @property
    def options(self) -> dict[str, Any]:
        """What :func:`torch.compile` takes."""
        return self.model_dump(exclude={"name"})


NOT_COMPILED = Compile(name="none", backend="inductor", mode=None, dynamic=None, fullgraph=False)


class ModelSection(Target):
    # With defaults, as in section optimizer: runs that were recorded earlier lack them.
    weights: Text | None = key(
        "start from this file of weights, or folder of its shards (or an argument of torchvision)",
        None,
    )
    strict: bool = key("refuse weights that lack tensors of the model, or have others", True)
    leave_out: Annotated[Texts, BeforeValidator(listed)] = key(
        "load all tensors but these patterns of names: [head.*]", []
    )

    @property
    def file(self) -> Path | None:
        """The file or folder that ``weights`` names; None if it is an argument of the target."""
        text = self.weights
        if text is None:
            return None
        is_path = "/" in text or text.endswith(SUFFIXES) or os.path.exists(text)
        return Path(text).expanduser() if is_path else None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the target, such as ``weights=DEFAULT`` of a model of torchvision."""
        is_argument = self.weights is not None and self.file is None
        return super().arguments | ({"weights": self.weights} if is_argument else {})


class OptimizerSection(Target):
    groups: dict[str, dict[str, Any]] | None = key(
        "set lr, weight_decay, ... by patterns of names: {*.bias:{weight_decay:0}}", None
    )
    no_decay: Literal["auto"] | None = key(
        "auto: no weight decay for vectors, scalars and embeddings", None
    )

    @property
    def leaves_out(self) -> str:
        """The first pattern of parameters that are not clipped; empty for none."""
        for pattern, settings in (self.groups or {}).items():
            if settings.get("clip") is False:
                return pattern
        return ""

    def conflicts(self) -> Conflicts:
        """Yield numbers, also in groups, that would make weights NaN."""
        yield from super().conflicts()
        for pattern, settings in (self.groups or {}).items():
            for name in not_finite(settings):
                yield "groups", f"{name} of {pattern} must be a finite number"


class SchedulerSection(Target):
    by: Literal["steps", "samples"] = key(
        "move the rate with each step, or with the samples of a step: once for each microbatch",
        "steps",
    )


class Collate(Target):
    target: DottedName | None = key(  # type: ignore[assignment]
        "make a batch of a list of samples by this; null: torch's, which needs equal shapes",
        None,
        alias="_target_",
    )


class DataSection(Target):
    batch_size: Count = key("samples in a rank's microbatch; lower it if out of memory")
    num_workers: Natural = key("processes that read ahead; raise it if training waits for data")
    drop_last: bool = key("leave out the last microbatch of an epoch if it is shorter")
    # With a default: runs that were recorded earlier lack it.
    collate: Collate = Collate()
    leave_out: LeaveOut = LeaveOut()


class LossSection(Target):
    target: DottedName | None = key(  # type: ignore[assignment]
        "import this criterion of (outputs, targets); null: the model's own loss, or cross entropy",
        None,
        alias="_target_",
    )
    # With a default: option files of users, and runs recorded earlier, lack it.
    items: Literal["auto", "samples", "labels", "none"] = key(
        "divide the loss by these; auto: find out; none: a plain mean over microbatches", "auto"
    )


class Tracker(Section):
    name: Literal[options("tracker")] = key("choose the tracker")  # type: ignore[valid-type]
    # With a default: runs that were recorded earlier lack it.
    target: DottedName | None = key(
        "record with this class of your own, called with the run's folder", None, alias="_target_"
    )
    also: list[Literal["tensorboard", "wandb"]] = key("record with these too, as [tensorboard]")
    mode: Literal["auto", "online", "offline", "disabled"] = key("auto: online with a key")
    project: Text = key("file runs under this project")
    group: Text | None = key("group runs by this name; null: by their sweep")
    tags: Texts = key("tag runs, to find them again")
    job_type: Text = key("say what kind of run this is, such as train")
    timeout: Positive = key("wait at most so many seconds at the end until wandb has the run")

    @property
    def own(self) -> Target | None:
        """The class of a sink that the user has written; None for a tracker of this project."""
        if self.target is None:
            return None
        return Target.model_validate({"_target_": self.target})

    def uses(self, tracker: str) -> bool:
        """Return whether a run is recorded with this tracker."""
        return tracker in (self.name, *self.also)

    def conflicts(self) -> Conflicts:
        """Yield names that wandb would refuse once the run has begun."""
        if not self.uses("wandb"):
            return
        if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
            yield "project", "wandb allows at most 128 characters, without / \\ # ? % or :"
        for tag in self.tags:
            if len(tag) > 64:
                yield (
                    "tags",
                    f"wandb allows at most 64 characters a tag, and {tag[:20]}... has {len(tag)}",
                )


class Train(Section):
    max_duration: DurationText = key("train this long, such as 3ep or 500ba")


class Eval(Section):
    interval: DurationText = key("evaluate this often; raise it if evaluation takes long")
    # With a default: files of users, and runs recorded earlier, lack it.
    metrics: list[Text | dict[str, Any]] = key(
        "log metrics of torchmetrics too, or a _target_: [f1,auroc]", []
    )

    def conflicts(self) -> Conflicts:
        """Yield a mapping that names nothing to call."""
        for metric in self.metrics:
            if isinstance(metric, dict) and "_target_" not in metric:
                yield "metrics", "a mapping needs a _target_"
                return


class EarlyStop(Section):
    patience: Count | None = key("end after so many evaluations without a better one")
    metric: Text = key("watch this metric of evaluations")
    min_delta: float = key("count as an improvement only what is better by this much", ge=0)
    direction: Direction = key("which is better; null: the lower, of an accuracy the higher")


class Log(Section):
    interval: Count = key("log a row of metrics every so many optimizer steps")
    flush: Count = key("copy metrics from the device every so many optimizer steps")


class Checkpoint(Section):
    interval: IntervalText | None = key("save this often, as 10min; null: when asked to stop")
    keep: Natural = key("keep so many newest checkpoints; lower it if the disk is small; 0: none")
    keep_best: bool = key("keep one more, that with the best sweep.objective so far")
    save_final: bool = key("save the weights of the end in checkpoints/final")
    asynchronous: Literal["auto"] | bool = key("train on while files are written")


class Telemetry(Section):
    per_layer: bool = key("log the gradient norm of each parameter, to find the layer that spikes")
    top: Natural = key("name so many parameters that make most of ‖G‖ in a clipped step", 3)
    update_ratio: bool = key("log ‖update‖/‖weights‖ of each step", False)
    noise_scale: bool = key("log how large a batch pays", False)  # earlier runs lack these three
    zeros: bool = key("log the share of zeros in the gradient", False)
    profile: StepRange | None = key("profile these steps: 10:13; see profile/", None)
    probe: Natural = key("print so many elements of the first parameter after each microbatch")


class Launch(Section):
    timeout: Positive = key("end the run if a collective or a batch takes more seconds")
    max_restarts: Natural = key("if a rank fails, go on from the last checkpoint so often")


class Shutdown(Section):
    timeout: Positive = key("end a run that was asked to stop after so many seconds")


class Resume(Section):
    source: Text = key("auto: what the run's folder holds; never; a run, or RUN@STEP", alias="from")
    force: bool = key("continue though the checkpoint has another configuration")


class SweepSection(Section):
    name: FolderName | None = key("name the folder; null: named after what varies")
    objective: Text = key("compare runs by the best value of this metric")
    direction: Direction = key("which is better; null: the lower, of an accuracy the higher")
    max_failures: Natural | None = key("stop after more failed runs than this; null: never")
    max_jobs: Count = key("refuse a sweep of more runs, such as range(0,1e9)")
    zip: Texts = key("advance the lists of these keys together, not as a product")

    @property
    def maximizes(self) -> bool:
        """Whether a higher value of the objective is better."""
        if self.direction is None:
            return higher_is_better(self.objective)
        return self.direction == "maximize"


class Report(Section):
    baseline: Text | Natural | None = key("compare with this setting; null: the best")


class Calibrate(Section):
    steps: int = key("measure this many optimizer steps without clipping", ge=2)
    warmup_steps: Natural | None = key("describe so many first steps separately; null: a tenth")
    output: Text | None = key("write to this folder; null: a new one in outputs/calibrations")

    def conflicts(self) -> Conflicts:
        """Yield a number of first steps that leaves none to measure."""
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            yield "warmup_steps", f"must leave some of calibrate.steps={self.steps}"


class Verify(Section):
    steps: Count = key("compare this many optimizer steps")
    dtype: Literal["float64", "float32"] = key("compute in this type; float64 errs least")
    tolerance: Positive | None = key("accept this relative error; null: 1e-9, in float32 1e-5")
    lr: Positive = key("take the steps of both sides by plain SGD at this rate")
    modes: Annotated[list[Literal[NAMES]], Field(min_length=1)] | None = key(  # type: ignore[valid-type]
        "modes, as [norm,value]; null: clip.mode"
    )

    @property
    def bound(self) -> float:
        """The relative error that is accepted."""
        return self.tolerance or (1e-9 if self.dtype == "float64" else 1e-5)


SHORT = {
    "resume": "resume.from",
    "clip.skip": "clip.skip.rule",
    "data.leave_out": "data.leave_out.steps",
}
"""Sections that may be given a value, and the key that it is the value of."""


class RunConfig(Section):
    """The configuration of one run. `runner.config.check` makes one of a plain dict."""

    plugin: PluginSection
    clip: Clip
    accumulation: Accumulation
    precision: Precision
    compile: Compile = NOT_COMPILED  # like loss
    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    scheduler: SchedulerSection
    loss: LossSection = LossSection()  # like report: runs that were recorded earlier lack it
    tracker: Tracker
    train: Train
    eval: Eval
    early_stopping: EarlyStop
    log: Log
    checkpoint: Checkpoint
    telemetry: Telemetry
    launch: Launch
    shutdown: Shutdown
    resume: Resume
    sweep: SweepSection
    report: Report = Report(baseline=None)
    calibrate: Calibrate
    verify: Verify
    # Seeds of numpy and scikit-learn end at 2**32 - 1; torch takes more.
    seed: int = key("change it to see how much runs differ by chance", ge=0, le=2**32 - 1)
    device: Literal["auto", "cpu", "cuda"] = key("train on it; auto: cuda where there is one")
    activation_checkpointing: Literal["none", "blocks"] | Count = key(
        "compute activations again in the backward pass: blocks; a number N: of every N-th block",
        "none",  # like loss
    )
    callbacks: list[Target] = key("call objects of your own after steps and evaluations")
    trust: bool = key("resume, evaluate: call any target that the run's config.yaml names", False)
    recipe: Text = key("start from this published setting; none: from none")

    def conflicts(self) -> Conflicts:
        """Yield values of several sections that exclude each other."""
        mode = self.clip.mode
        if self.clip.info.needs_optimizer and self.optimizer.leaves_out:
            text = f"leaves {self.optimizer.leaves_out} out of clipping, but clip={mode}"
            yield "optimizer.groups", f"{text} limits the step of all parameters: use clip=norm"
        for name in self.verify.modes or ():
            nested = MODES[name].info.nested
            if nested and name != mode:
                yield "verify.modes", f"{name} needs clip.{nested}: give clip={name} too"

    @property
    def checkpointed_blocks(self) -> int:
        """N where every N-th block computes its activations again; 0 for none."""
        names = {"none": 0, "blocks": 1}
        chosen = self.activation_checkpointing
        return chosen if isinstance(chosen, int) else names[chosen]
