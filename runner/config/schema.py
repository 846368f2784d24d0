"""Every key that this project owns: its type, its range and what it means.

Each field is ``name: Annotated[type, rule, meaning]``: the rule says what is allowed, the meaning
is what ``--help`` prints. There are no defaults here: a default lives in one file of ``conf/``.
A rule that concerns several keys of a section is that section's method ``conflicts``; one that
concerns several sections is `RunConfig`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from runner.config.duration import Duration
from runner.config.folders import options
from runner.config.objective import higher_is_better
from runner.config.plugin_section import PluginSection, pipeline_microbatches
from runner.config.problem import Conflict
from runner.config.rules import (
    dotted_name,
    duration,
    either,
    folder_name,
    integer,
    names_of,
    norm_order,
    number,
    numbers,
    one_of,
    option_of,
    optional,
    output_dims,
    switch,
    text,
    texts,
)

# Seeds of numpy and scikit-learn end here; torch takes more.
_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Clip:
    """How the gradient of each optimizer step is clipped."""

    mode: Annotated[str, option_of("clip"), "what is clipped"]
    threshold: Annotated[
        float | None, optional(number(above=0), " with clip=none"), "where clipping begins"
    ]
    norm_type: Annotated[float, norm_order(), "the norm that is measured"]
    exclude: Annotated[
        Literal["auto"] | list[str],
        either(one_of("auto"), texts()),
        "adaptive: parameters left alone, as patterns of names; auto: the weights of the heads",
    ]
    units: Annotated[
        dict[str, int | list[int]] | None,
        optional(output_dims()),
        "adaptive: patterns of parameters, each with the dimension(s) that index its outputs",
    ]
    eps: Annotated[float, number(above=0), "adaptive: lower bound of a weight's norm"]
    nonfinite: Annotated[
        Literal["skip", "error", "ignore"],
        one_of("skip", "error", "ignore"),
        "what to do with a step whose gradient is not finite",
    ]
    what_if: Annotated[
        list[float],
        numbers(above=0),
        "extra thresholds: log the share of steps each would have clipped",
    ]

    def conflicts(self) -> Iterator[Conflict]:
        """A threshold that nothing would use, or none where one is needed."""
        if self.mode == "none" and self.threshold is not None:
            yield Conflict("threshold", "clip=none clips nothing, so it takes no threshold")
        if self.mode != "none" and self.threshold is None:
            yield Conflict(
                "threshold", f"clip={self.mode} needs a finite number greater than 0; or clip=none"
            )


@dataclass(frozen=True)
class Accumulation:
    """How many microbatches make one optimizer step."""

    steps: Annotated[int, integer(1), "microbatches to one optimizer step"]


@dataclass(frozen=True)
class Precision:
    """What numbers the forward pass is computed in."""

    name: Annotated[
        Literal["fp32", "bf16", "fp16"],
        one_of("fp32", "bf16", "fp16"),
        "numbers of the forward pass",
    ]
    initial_scale: Annotated[float, number(above=0), "fp16: the loss scale to begin with"]
    growth_interval: Annotated[
        int, integer(1), "fp16: good steps in a row after which the loss scale doubles"
    ]


@dataclass(frozen=True)
class Target:
    """An object of any library.

    Attributes:
        target: the full name of the class or function, key ``_target_``.
        arguments: every other key, as plain containers; the runner may add some when it calls it.
    """

    target: Annotated[str, dotted_name(), "the class or function"]
    arguments: dict[str, Any] = field(default_factory=dict)

    def mapping(self) -> dict[str, Any]:
        """What `hydra.utils.instantiate` takes."""
        return {"_target_": self.target, **self.arguments}


@dataclass(frozen=True)
class DataSection(Target):
    """The data, and how it is read: the runner's own keys stand beside those of the target."""

    batch_size: Annotated[
        int, integer(1), "samples in one microbatch of one data-parallel rank"
    ] = field(kw_only=True)
    num_workers: Annotated[int, integer(0), "processes that read ahead; 0: none"] = field(
        kw_only=True
    )
    drop_last: Annotated[bool, switch(), "leave out the last, shorter microbatch of an epoch"] = (
        field(kw_only=True)
    )


@dataclass(frozen=True)
class Tracker:
    """Where a run is shown beside its own folder."""

    name: Annotated[str, option_of("tracker"), "the tracker"]
    mode: Annotated[
        Literal["auto", "online", "offline", "disabled"],
        one_of("auto", "online", "offline", "disabled"),
        "auto: online where a key is configured, else offline",
    ]
    project: Annotated[str, text(), "the project that runs are filed under"]
    group: Annotated[str | None, optional(text()), "what runs are grouped by"]
    tags: Annotated[list[str], texts(), "tags of a run"]
    job_type: Annotated[str, text(), "the kind of run"]


@dataclass(frozen=True)
class Train:
    """How long to train."""

    max_duration: Annotated[Duration, duration(), "when training ends, such as 3ep or 500ba"]


@dataclass(frozen=True)
class Eval:
    """When to evaluate on held-out data."""

    interval: Annotated[Duration, duration(), "how often to evaluate"]


@dataclass(frozen=True)
class Log:
    """When figures are written."""

    interval: Annotated[int, integer(1), "optimizer steps from one row of figures to the next"]
    flush: Annotated[
        int, integer(1), "optimizer steps from one transfer off the device to the next"
    ]


@dataclass(frozen=True)
class Telemetry:
    """What is measured beyond the usual."""

    per_layer: Annotated[bool, switch(), "the gradient norm of every parameter too"]
    probe: Annotated[
        int, integer(0), "elements of the first parameter to print after each microbatch"
    ]


@dataclass(frozen=True)
class Launch:
    """How ranks are started and watched."""

    timeout: Annotated[float, number(above=0), "seconds that one collective may take"]


@dataclass(frozen=True)
class SweepSection:
    """A Hydra multirun."""

    name: Annotated[
        str | None,
        optional(folder_name()),
        "its folder; null: named after what varies, the same for the same jobs",
    ]
    objective: Annotated[str, text(), "the metric that runs are compared by, at its best"]
    direction: Annotated[
        Literal["minimize", "maximize"] | None,
        optional(one_of("minimize", "maximize")),
        "which objective is better; null: the lower, of an accuracy the higher",
    ]
    max_failures: Annotated[
        int | None, optional(integer(0)), "failed runs it goes on after; null: any number"
    ]
    zip: Annotated[list[str], texts(), "keys whose lists advance together, not as a product"]

    @property
    def maximizes(self) -> bool:
        """Whether a higher objective is better."""
        if self.direction is None:
            return higher_is_better(self.objective)
        return self.direction == "maximize"


@dataclass(frozen=True)
class Calibrate:
    """What `python -m runner calibrate` does; a run takes no notice."""

    steps: Annotated[int, integer(2), "optimizer steps to measure, unclipped"]
    warmup_steps: Annotated[
        int | None, optional(integer(0)), "first steps to describe apart; null: a tenth"
    ]
    output: Annotated[
        str | None, optional(text()), "folder to write; null: a new one in outputs/calibrations"
    ]

    def conflicts(self) -> Iterator[Conflict]:
        """Nothing but warm-up."""
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            yield Conflict("warmup_steps", f"must leave some of calibrate.steps={self.steps}")


@dataclass(frozen=True)
class Verify:
    """What `python -m runner verify` does; a run takes no notice."""

    steps: Annotated[int, integer(1), "optimizer steps to compare"]
    dtype: Annotated[
        Literal["float64", "float32"], one_of("float64", "float32"), "dtype of both computations"
    ]
    tolerance: Annotated[
        float | None,
        optional(number(above=0)),
        "largest relative error; null: 1e-9 in float64, 1e-5 in float32",
    ]
    lr: Annotated[float, number(above=0), "learning rate of the plain SGD that both sides step by"]
    modes: Annotated[
        list[str] | None,
        optional(names_of(*options("clip"))),
        "clipping modes to compare; null: the one that is chosen",
    ]

    @property
    def bound(self) -> float:
        """The largest relative error that is taken for rounding."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-9 if self.dtype == "float64" else 1e-5


@dataclass(frozen=True)
class RunConfig:
    """One training job, entirely.

    `runner.config.check.parse` makes one of a plain dict, and is the only way that checks.
    """

    plugin: PluginSection
    clip: Clip
    accumulation: Accumulation
    precision: Precision
    model: Target
    data: DataSection
    optimizer: Target
    scheduler: Target
    tracker: Tracker
    train: Train
    eval: Eval
    log: Log
    telemetry: Telemetry
    launch: Launch
    sweep: SweepSection
    calibrate: Calibrate
    verify: Verify
    seed: Annotated[int, integer(0, _LARGEST_SEED), "seed of all random numbers"]
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        one_of("auto", "cpu", "cuda"),
        "auto: cuda where there is one",
    ]
    recipe: Annotated[str, text(), "the published setting that was chosen, or none"]

    def conflicts(self) -> Iterator[Conflict]:
        """A batch that a pipeline cannot be filled with."""
        parts = pipeline_microbatches(self.plugin)
        if parts is not None and self.data.batch_size < parts:
            filled = f"to fill {parts} microbatches of a pipeline (plugin.num_microbatches)"
            yield Conflict("data.batch_size", f"must be {parts} or more, {filled}")
