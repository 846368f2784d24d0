"""Small models trained for a few steps under any plugin, and what one process makes of the same."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runner import Trainer
from runner.booster import LossScale, Plugin, SinglePlugin
from runner.booster.plugin import PLUGINS as KINDS
from runner.clip import build
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from runner.parallel.full_state_dict import gathered
from tests.distributed.training import Rows, images, of_images, tokens
from tests.on_device import call_kept_on_device
from tests.trainers import trainer_of

BATCH = 12
"""Samples of one microbatch over all data parts."""

SHAPE = {"vocabulary": 17, "context": 12, "layers": 2, "heads": 4, "width": 12, "dropout": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(**SHAPE, tied=False, bias=True),
    "tied": lambda: GPT(**SHAPE, tied=True, bias=False),
    # Ranks share five experts unevenly.
    "moe": lambda: MixtureGPT(**SHAPE, tied=False, bias=True, experts=5, top_k=2),
    "moe_no_bias": lambda: MixtureGPT(**SHAPE, tied=False, bias=False, experts=5, top_k=2),
    "conv": of_images,
}

Stages, Tensors, Hybrid, Experts, Zero, Ddp, Fsdp = map(
    KINDS.__getitem__, ("pipeline", "tensor", "hybrid", "moe", "zero", "ddp", "fsdp")
)
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": Ddp,
    "fsdp": Fsdp,
    "fsdp_gathered": partial(Fsdp, reshard_after_forward=False),
    "hsdp": partial(Fsdp, dp_replicate=2),
    "offload": partial(Fsdp, cpu_offload=True),
    "zero_offload": partial(Zero, stage=3, cpu_offload=True),
    **{f"zero{stage}": partial(Zero, stage=stage) for stage in (1, 2, 3)},
    "tensor": Tensors,
    "tensor_dp": partial(Tensors, tp_size=2),
    "sequence": partial(Tensors, sequence_parallel=True),
    "gpipe": partial(Stages, schedule="gpipe"),
    "1f1b": Stages,
    "pipeline_dp": partial(Stages, pp_size=2),
    "interleaved": partial(Stages, schedule="interleaved_1f1b"),
    "interleaved_dp": partial(Stages, pp_size=2, schedule="interleaved_1f1b"),
    "zero_bubble": partial(Stages, schedule="zero_bubble"),
    "zero_bubble_dp": partial(Stages, pp_size=2, schedule="zero_bubble"),
    "moe": Experts,
    "moe_dp": partial(Experts, ep_size=2),
    "moe_zero1": partial(Experts, ep_size=2, zero_stage=1),
    "moe_zero3": partial(Experts, ep_size=2, zero_stage=3),
    "hybrid": partial(Hybrid, tp_size=2, pp_size=2),
    "hybrid_zero1": partial(Hybrid, tp_size=2, pp_size=2, zero_stage=1),
    "hybrid_zero2": partial(Hybrid, tp_size=2, pp_size=2, zero_stage=2),
    "hybrid_fsdp_tp": partial(Hybrid, tp_size=2, zero_stage=3),
    "hybrid_fsdp_pp": partial(Hybrid, pp_size=2, zero_stage=2),
    "hybrid_ep_tp": partial(Hybrid, tp_size=2, ep_size=2),
    "hybrid_ep_pp": partial(Hybrid, pp_size=2, ep_size=2),
    "hybrid_ep_all": partial(Hybrid, tp_size=2, pp_size=2, ep_size=2),
    "hybrid_sequence": partial(Hybrid, tp_size=2, pp_size=2, sequence_parallel=True, zero_stage=1),
}


def fewest(plugin: str) -> int:
    """Smallest number of ranks on which a plugin does all that it can."""
    four = plugin.startswith(("hybrid", "hsdp", "moe_")) or plugin.endswith("_dp")
    return 4 if four else 2


FAMILIES: dict[int, dict[str, str]] = {
    2: dict.fromkeys(("ddp", "tensor", "1f1b", "zero_bubble"), "tied")
    | {"fsdp": "conv", "zero1": "conv", "zero2": "gpt", "sequence": "gpt", "moe": "moe"},
    4: {"hsdp": "conv", "hybrid_fsdp_tp": "gpt", "hybrid_zero1": "tied", "moe_zero3": "moe"},
}
"""By the number of ranks, of each kind of plugin one, and a model for it."""

_ADAGC = {"threshold": 1.2, "warmup_steps": 2, "absolute": 0.05, "beta": 0.8}
_ADAPTIVE = {"mode": "adaptive", "threshold": 0.02}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "L2": ("norm", {"threshold": 0.05}),
    "L1": ("norm", {"threshold": 0.5, "norm_type": 1.0}),
    "L3": ("norm", {"threshold": 0.02, "norm_type": 3.0}),
    "inf": ("norm", {"threshold": 0.01, "norm_type": float("inf")}),
    "value": ("value", {"threshold": 0.003}),
    "adaptive": ("adaptive", {"threshold": 0.02}),
    "adagc": ("adagc", _ADAGC),
    "per_parameter": ("per_parameter", {"threshold": 0.02}),
    "blocks": ("per_parameter", {"threshold": 0.02, "by": "block", "norm_type": float("inf")}),
    "chain": ("chain", {"links": [{"mode": "adagc", **_ADAGC}, _ADAPTIVE, 0.02]}),
    # Some ranks of a pipeline have no shard of the first or of the last group.
    "groups": ("groups", {"groups": {"*.0.*": _ADAPTIVE, "*norm.weight": "none", "*": 0.01}}),
    "percentile": ("percentile", {"threshold": 40.0, "min_steps": 2, "window": 5}),
    "zscore": ("zscore", {"threshold": 0.2, "warmup_steps": 3, "history": "raw"}),
    "schedule": ("schedule", {"threshold": 0.02, "of": "value", "warmup_steps": 4}),
    "rms": ("update", {"threshold": 0.05}),
    "spike": ("spike", {"threshold": 4.0, "min_steps": 1}),
    "spike L1": ("spike", {"threshold": 4.0, "min_steps": 1, "norm_type": 1.0}),
}
OF_ADAMW = ("rms", "spike", "spike L1")
"""Modes that read an optimizer's second moments."""


@dataclass(frozen=True)
class Case:
    """One training: which model, how clipped, how many microbatches to a step, how many steps."""

    model: str
    mode: str
    accumulation: int = 1
    double: bool = True
    steps: int = 5
    precision: str = "fp32"
    rate: float = 1.0
    optimizer: str = "sgd"
    kept: bool = field(default=False, compare=False)
    """Whether metrics stay on the device, as on an accelerator: no part of what it comes to."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def half(self) -> bool:
        return self.precision != "fp32"

    @property
    def fused(self) -> bool:
        """Whether ranks clip inside of a fused step."""
        return self.optimizer == "adamw" and not self.double


def make_optimizer(case: Case, fused: bool) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    if case.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=case.rate)
    if case.optimizer == "momentum":
        return partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    # An eps near the size of the gradients: rounding errors of zero gradients stay small.
    betas = (0.2, 0.6)
    return partial(torch.optim.AdamW, lr=0.02, betas=betas, eps=1e-3, weight_decay=0.1, fused=fused)


def trainer(
    case: Case,
    plugin: str | Plugin | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    **options: Any,
) -> Trainer:
    """Make a trainer of ``case`` under a plugin or its name, or in one process for None."""
    chosen = SinglePlugin() if plugin is None else plugin
    spread = PLUGINS[chosen]() if isinstance(chosen, str) else chosen

    def loader(samples: int, **order: Any) -> Any:
        data = images(samples, case.dtype) if case.model == "conv" else tokens(samples)
        return spread.prepare_dataloader(data, BATCH // spread.data_size, **order)

    if model is None:
        torch.manual_seed(0)
        model = MODELS[case.model]().to(case.dtype)
    kind, of_mode = MODES[case.mode]
    make = optimizer or make_optimizer(case, fused=case.fused and plugin is not None)
    scale = LossScale(scale=2.0**10) if case.precision == "fp16" else None
    settings = {
        "eval_interval": f"{case.steps}ba",
        "algorithms": build(kind, **of_mode),
        "eval_dataloader": loader(BATCH + 1),
        "optimizers": make(model.parameters()),
        "plugin": spread,
        "accumulation_steps": case.accumulation,
        "precision": case.precision,
        "loss_scale": scale,
    }
    # One sample over whole microbatches, so that the last one of an epoch is short and uneven.
    samples = loader(BATCH * case.accumulation * 2 + 1, shuffle=True, seed=5)
    return trainer_of(model, samples, f"{case.steps}ba", **settings | options)


def train(case: Case, plugin: str | Plugin | None = None, **options: Any) -> dict[str, Any]:
    """Rows of every step; on the first rank the weights at the end, and under plain SGD the clipped
    gradients of the last step (the others show there), in half precision of the first one.
    """
    if case.kept:
        return call_kept_on_device(partial(train, replace(case, kept=False), plugin, **options))
    rows = Rows()
    training = trainer(case, plugin, sinks=[rows], **options)
    model = training.model.unwrap()
    renamed = training.model.renamed
    gradients: dict[str, torch.Tensor] = {}
    step = training.optimizer.step
    when = 0 if case.half else case.steps - 1  # rounding errors add up

    def keep() -> bool:
        if training.state.progress.step == when and case.optimizer == "sgd":
            gradients.update(gathered(model, renamed, lambda p: p.grad))
        return step()

    training.optimizer.step = keep  # type: ignore[method-assign]
    training.fit()
    return {
        "rows": rows.rows,
        "weights": training.booster.state_dict(training.model),
        "gradients": gradients,
        "history": repr(training.state.mode.state_dict()),
        "parts": [(_part(renamed.get(n, n), p), _bits(p)) for n, p in model.named_parameters()],
    }


def _part(name: str, tensor: torch.Tensor) -> Any:
    """A parameter's name, and along each axis that shards it how many parts there are and which."""
    if not isinstance(tensor, DTensor):
        return name
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    placed = zip(tensor.placements, tensor.device_mesh.shape, where, strict=True)
    return name, tuple(
        (size, position) for p, size, position in placed if not p.is_replicate() and size > 1
    )


def _bits(tensor: torch.Tensor) -> tuple[int, str]:
    """Number of elements on this rank, and what stands for their bits."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel(), hashlib.sha256(part.detach().contiguous().numpy().tobytes()).hexdigest()


@cache
def in_one_process(case: Case) -> dict[str, Any]:
    """What one process whose host reads every metric makes of ``case``."""
    return train(replace(case, kept=False))


EXACT = ("train/step", "train/samples", "train/tokens", "clip/clipped", "eval/accuracy")
CLOSE = ("train/loss", "grad/norm", "grad/norm_clipped", "eval/loss", "clip/coef", "clip/fraction")
INNER = ("clip/link/", "clip/group/", "clip/threshold")
NOISE = "clip/link/0/peak"
"""The gradient of a key's bias is zero but for rounding: its ratio may be the largest."""

TIMES = ("time/step_s", "throughput/samples_per_s")


def differences(ours: Sequence[dict[str, Any]], case: Case, rel: float) -> list[str]:
    """Describe where results of the ranks differ from one process; empty if nowhere.

    ``rel`` is the largest relative error of a metric, and of a tensor by its L2 norm. In float64
    the share that was clipped is equal bit for bit; in half precision a tensor may be off by more.
    """
    reference = in_one_process(case)
    half = case.half
    exact, close = (EXACT[:-1], CLOSE[:-2]) if half else (EXACT, CLOSE)
    if case.double:
        exact = (*exact, "clip/fraction")
    problems: list[str] = []
    for rank, result in enumerate(ours):
        for row, expected in zip(result["rows"], reference["rows"], strict=True):
            place = f"rank {rank} step {row['train/step']}"
            problems += [f"{place}: {k}" for k in exact if row.get(k) != expected.get(k)]
            inner = {key for key in row.keys() | expected.keys() if key.startswith(INNER)} - {NOISE}
            for key in (*close, *inner):
                a = row.get(key, 0.0)
                b = expected.get(key, 0.0)
                if not abs(a - b) <= rel * max(abs(b), 1e-30):
                    problems.append(f"{place}: {key} {a!r} instead of {b!r}")
    problems += uneven(ours)
    pairs = [("weights", ours[0]["weights"], reference["weights"])]
    if case.optimizer == "sgd":
        pairs.append(("gradient", ours[0]["gradients"], reference["gradients"]))
    for what, got, expected in pairs:
        if half and "moe" in case.model:
            # A token on the edge between two experts may go to the other one, whose gradients are
            # then those of other tokens: only the model as a whole has a bound.
            got, expected = (
                {"all": torch.cat([t.flatten() for _, t in sorted(tensors.items())])}
                for tensors in (got, expected)
            )
        problems += unlike(what, got, expected, 8 * rel if half else rel)
    return problems


def uneven(ours: Sequence[dict[str, Any]]) -> list[str]:
    """Describe metrics, histories and replicas whose bits differ from those of another rank."""
    bits_of_parts: dict[Any, set[Any]] = {}
    for result in ours:
        for part, bits in (*result.get("parts", ()), ("history", result.get("history"))):
            bits_of_parts.setdefault(part, set()).add(bits)
    return [
        f"{part} is another one on another rank"
        for part in bits_of_parts
        if len(bits_of_parts[part]) > 1
    ] + [
        f"rank {rank} step {row['train/step']}: {key} is not that of rank 0"
        for rank, result in enumerate(ours)
        for row, first in zip(result["rows"], ours[0]["rows"], strict=True)
        for key in row.keys() | first.keys()
        if key not in TIMES and repr(row.get(key)) != repr(first.get(key))
    ]


def unlike(
    what: str, got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rel: float
) -> list[str]:
    """Which tensors are not those wanted, each by the L2 norm of the difference.

    A tensor that one side does not have is one of zeros.
    """
    largest = max((float(tensor.norm()) for tensor in wanted.values()), default=0.0)
    problems = []
    for name, tensor in (got | wanted).items():
        # Some gradients are zero but for rounding (that of a key's bias): to the largest, then.
        size = max(float(tensor.norm()) if name in wanted else 0.0, 1e-3 * largest)
        zeros = torch.zeros_like(tensor)
        off = float((got.get(name, zeros) - wanted.get(name, zeros)).norm())
        if not off <= rel * size:
            problems.append(f"{what}: {name} is off by {off}, of {size}")
    return problems
