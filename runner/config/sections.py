"""The sections of a configuration: the type, the range and the meaning of each key.

Sections ``plugin`` and ``clip`` have modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runner.config import section as t
from runner.config.modes import NAMES
from runner.config.notation import higher_is_better
from runner.config.section import Conflict, OneOf, Section, Target, key, option_of

Direction = Literal["minimize", "maximize"] | None


class Accumulation(Section):
    steps: t.Count = key("microbatches of one optimizer step; raise it if a batch does not fit")


class Precision(Section):
    name: Literal["fp32", "bf16", "fp16"] = key("choose the data type of the forward pass")
    initial_scale: t.Positive = key("fp16: first loss scale; lower it if first steps are skipped")
    growth_interval: t.Count = key("fp16: double the scale after so many finite steps")


OWN_DATA = "runner.data.dataset.own"
"""The ``_target_`` of data whose parts are named by ``data.train`` and ``data.eval``."""


class DataSection(Target):
    batch_size: t.Count = key("samples in a rank's microbatch; lower it if out of memory")
    num_workers: t.Natural = key("processes that read ahead; raise it if training waits for data")
    drop_last: bool = key("leave out the last microbatch of an epoch if it is shorter")

    @property
    def parts(self) -> dict[str, Target]:
        """The targets in ``train`` and ``eval``, by these names; of :data:`OWN_DATA` alone."""
        given = self.arguments if self.target == OWN_DATA else {}
        return {
            name: Target.model_validate(given[name])
            for name in ("train", "eval")
            if isinstance(given.get(name), Mapping) and given[name].get("_target_") is not None
        }

    def mapping(self) -> dict[str, Any]:
        """Return what `hydra.utils.instantiate` takes, without the targets in it."""
        own = ("train", "eval") if self.target == OWN_DATA else ()
        return {name: value for name, value in super().mapping().items() if name not in own}

    @model_validator(mode="before")
    @classmethod
    def _own(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "train" not in given or "_target_" in given:
            return given
        return {**given, "_target_": OWN_DATA}


class LossSection(Target):
    target: t.DottedName | None = key(  # type: ignore[assignment]
        "import this criterion of (outputs, targets); null: the model's own loss, or cross entropy",
        None,
        alias="_target_",
    )


class Tracker(Section):
    name: Annotated[str, option_of("tracker")] = key("choose the tracker")
    also: list[Literal["tensorboard", "wandb"]] = key("record with these too, as [tensorboard]")
    mode: Literal["auto", "online", "offline", "disabled"] = key("auto: online with a key")
    project: t.Text = key("file runs under this project")
    group: t.Text | None = key("group runs by this name; null: by their sweep")
    tags: t.Texts = key("tag runs, to find them again")
    job_type: t.Text = key("say what kind of run this is, such as train")
    timeout: t.Positive = key("wait at most so many seconds at the end until wandb has the run")

    def uses(self, tracker: str) -> bool:
        return tracker in (self.name, *self.also)


class Train(Section):
    max_duration: t.DurationText = key("train this long, such as 3ep or 500ba")


class Eval(Section):
    interval: t.DurationText = key("evaluate this often; raise it if evaluation takes long")
    # With a default: files of users, and runs recorded earlier, lack it.
    metrics: t.Metrics = key("log metrics of torchmetrics too, or a _target_: [f1,auroc]", [])


class EarlyStop(Section):
    patience: t.Count | None = key("end after so many evaluations without a better one")
    metric: t.Text = key("watch this metric of evaluations")
    min_delta: float = key("count as an improvement only what is better by this much", ge=0)
    direction: Direction = key("which is better; null: the lower, of an accuracy the higher")


class Log(Section):
    interval: t.Count = key("log a row of metrics every so many optimizer steps")
    flush: t.Count = key("copy metrics from the device every so many optimizer steps")


class Checkpoint(Section):
    interval: t.IntervalText | None = key("save this often, as 10min; null: when asked to stop")
    keep: t.Natural = key("keep so many newest checkpoints; lower it if the disk is small; 0: none")
    keep_best: bool = key("keep one more, that with the best sweep.objective so far")
    save_final: bool = key("save the weights of the end in checkpoints/final")
    asynchronous: Literal["auto"] | bool = key("train on while files are written")


class Telemetry(Section):
    per_layer: bool = key("log the gradient norm of each parameter, to find the layer that spikes")
    # With defaults: runs that were recorded earlier lack them.
    update_ratio: bool = key("log the norm of each update over that of the weights", False)
    probe: t.Natural = key("print so many elements of the first parameter after each microbatch")


class Launch(Section):
    timeout: t.Positive = key("end the run if a collective takes more seconds")
    max_restarts: t.Natural = key("if a rank fails, go on from the last checkpoint so often")


class Shutdown(Section):
    timeout: t.Positive = key("end a run that was asked to stop after so many seconds")


class Resume(Section):
    source: t.Text = key("auto: what the run's folder holds; never; or a path", alias="from")
    force: bool = key("continue though the checkpoint is that of another configuration")


class SweepSection(Section):
    name: t.FolderName | None = key("name the folder; null: named after what varies")
    objective: t.Text = key("compare runs by the best value of this metric")
    direction: Direction = key("which is better; null: the lower, of an accuracy the higher")
    max_failures: t.Natural | None = key("stop after more failed runs than this; null: never")
    max_jobs: t.Count = key("refuse a sweep of more runs, such as that of range(0,1e9)")
    zip: t.Texts = key("advance the lists of these keys together, not as a product")

    @property
    def maximizes(self) -> bool:
        if self.direction is None:
            return higher_is_better(self.objective)
        return self.direction == "maximize"


class Report(Section):
    baseline: t.Text | t.Natural | None = key("compare with this setting; null: the best")


class Calibrate(Section):
    steps: int = key("measure this many optimizer steps without clipping", ge=2)
    warmup_steps: t.Natural | None = key("describe so many first steps separately; null: a tenth")
    output: t.Text | None = key("write to this folder; null: a new one in outputs/calibrations")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            yield Conflict("warmup_steps", f"must leave some of calibrate.steps={self.steps}")


class Verify(Section):
    steps: t.Count = key("compare this many optimizer steps")
    dtype: Literal["float64", "float32"] = key("compute in this type; float64 errs least")
    tolerance: t.Positive | None = key("accept this relative error; null: 1e-9, in float32 1e-5")
    lr: t.Positive = key("take the steps of both sides by plain SGD at this rate")
    modes: Annotated[list[Annotated[str, OneOf(NAMES)]], Field(min_length=1)] | None = key(
        "modes, as [norm,value]; null: clip.mode"
    )

    @property
    def bound(self) -> float:
        return self.tolerance or (1e-9 if self.dtype == "float64" else 1e-5)
