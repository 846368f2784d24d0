"""Folders as runs and sweeps leave them, with plausible made-up values.

The gradient norm is drawn log-normally around a level that falls over the run, with a few spikes; a
threshold too low slows the loss, one too high lets spikes through. Also a command:
``python tests/report/examples.py FOLDER`` writes one example of each kind to look at.
"""

from __future__ import annotations

import json
import math
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

# A process that cannot be: beyond any machine's highest number.
NO_SUCH_PROCESS = 2**22 + 12345


def config(**changes: Any) -> dict[str, Any]:
    """A resolved configuration; ``section__key=value`` changes one key."""
    whole: dict[str, Any] = {
        "recipe": "none",
        "seed": 0,
        "device": "auto",
        "plugin": {"name": "single", "nproc": 1},
        "clip": {"mode": "norm", "threshold": 1.0, "norm_type": 2.0, "exclude": "auto"},
        "accumulation": {"steps": 1},
        "precision": {"name": "fp32"},
        "model": {"_target_": "runner.models.cnn", "width": 32},
        "data": {"_target_": "runner.data.digits", "batch_size": 32},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
        "scheduler": {"_target_": "runner.optim.schedulers.CosineAnnealingLR"},
        "tracker": {"name": "wandb", "mode": "auto", "tags": []},
        "train": {"max_duration": "15ep"},
        "log": {"interval": 1, "flush": 50},
    }
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        if inner:
            whole[section] = {**whole[section], inner: value}
        else:
            whole[section] = value
    return whole


def rows(
    mode: str = "norm",
    threshold: float | None = 1.0,
    steps: int = 400,
    seed: int = 0,
    diverges_at: int | None = None,
    evaluations: int = 10,
    layers: tuple[str, ...] = (),
    what_if: tuple[float, ...] = (),
) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``, one a step; numbers that are not finite as Python has them."""
    random = np.random.default_rng(seed)
    at = np.arange(1, steps + 1)
    norm = (0.35 + 1.8 * np.exp(-at / (0.25 * steps))) * np.exp(random.normal(0, 0.35, steps))
    norm[random.integers(0, steps, max(1, steps // 90))] *= 12
    cut = threshold if mode == "norm" and threshold else None
    # An element's, or a unit's, threshold acts on ‖G‖ in an undetermined way: some power of it.
    other = threshold * 4 if threshold and mode != "norm" else None
    after = np.minimum(norm, cut) if cut else norm.copy()
    if other:
        after = np.where(norm > other, norm * (other / norm) ** 0.4, norm)
    coef = after / norm
    slow = 1 - 0.75 * (1 - coef.mean()) + (0.25 if not threshold else 0.04 * math.log1p(threshold))
    floor = 0.1 + 0.12 * abs(math.log10((threshold or 30) / 0.6)) * (0.3 if mode != "norm" else 1)
    loss = floor + 2.2 * np.exp(-at * slow / (0.18 * steps))
    loss = loss * np.exp(random.normal(0, 0.09, steps))
    if diverges_at is not None:
        grow = np.arange(steps - diverges_at)
        loss[diverges_at:] = np.where(grow < 12, loss[diverges_at - 1] * 2.0**grow, np.nan)
        norm[diverges_at:] = np.where(grow < 12, norm[diverges_at - 1] * 3.0**grow, np.nan)
        after[diverges_at:] = np.where(grow < 12, after[diverges_at:], np.nan)
    return _as_rows(mode, threshold, at, loss, norm, after, evaluations, layers, what_if, random)


def _as_rows(
    mode: str,
    threshold: float | None,
    at: np.ndarray,
    loss: np.ndarray,
    norm: np.ndarray,
    after: np.ndarray,
    evaluations: int,
    layers: tuple[str, ...],
    what_if: tuple[float, ...],
    random: np.random.Generator,
) -> list[dict[str, Any]]:
    steps = len(at)
    clipped = (norm > after).astype(int)
    total = np.cumsum(clipped) / at
    lost = np.cumsum(~np.isfinite(norm))
    share = {x: np.cumsum(norm > x * (4 if mode != "norm" else 1)) / at for x in what_if}
    of_layer = random.dirichlet(np.ones(max(len(layers), 1)), steps) ** 0.5 * norm[:, None]
    every = max(1, steps // evaluations) if evaluations else steps + 1
    made = []
    for i in range(steps):
        coef = after[i] / norm[i]
        row = {
            "train/step": int(at[i]),
            "train/loss": float(loss[i]),
            "train/lr": 0.05,
            "train/samples": int(at[i]) * 32,
            "grad/norm": float(norm[i]),
            "grad/norm_clipped": float(after[i]),
            "grad/norm_mean": float(norm[i]),
            "grad/norm_max": float(norm[i]),
            "grad/nonfinite": int(lost[i]),
            "clip/coef": float(coef),
            "clip/clipped": int(clipped[i]),
            "clip/fraction": float(clipped[i]),
            "clip/ratio": float(clipped[i]),
            "clip/ratio_total": float(total[i]),
            "time/step_s": 0.004,
            "throughput/samples_per_s": 8000.0,
        }
        if threshold is not None:
            row["clip/threshold"] = threshold
        row |= {f"clip/what_if/{x}": float(shares[i]) for x, shares in share.items()}
        row |= {f"grad/norm/{name}": float(of_layer[i, j]) for j, name in enumerate(layers)}
        if (i + 1) % every == 0:
            row["eval/loss"] = float(loss[i] * 1.1)
            row["eval/accuracy"] = float(1 / (1 + loss[i])) if math.isfinite(loss[i]) else 0.1
        made.append(row)
    return made


def summary(made: list[dict[str, Any]], remarks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """What a run that came to its end writes of itself."""
    norms = np.asarray([row["grad/norm"] for row in made])
    finite = norms[np.isfinite(norms)]
    points = np.percentile(finite, (50, 90, 95, 99))
    best: dict[str, float] = {}
    final: dict[str, float] = {}
    for row in made:
        final |= row
        for key in ("train/loss", "eval/loss", "eval/accuracy"):
            value = row.get(key, math.nan)
            if not math.isnan(value):
                better = max if key.endswith("accuracy") else min
                best[key] = better(best.get(key, value), value)
    final.pop("train/step")
    return {
        "final": final,
        "best": best,
        "grad/norm": dict(zip(("p50", "p90", "p95", "p99"), map(float, points), strict=True))
        | {"max": float(finite.max()), "mean": float(finite.mean())},
        "clip/ratio_total": made[-1]["clip/ratio_total"],
        "grad/nonfinite": made[-1]["grad/nonfinite"],
        "steps": len(made),
        "samples": len(made) * 32,
        "wall_s": 0.031 * len(made),
        "parameters": 18_730,
        "world_size": 1,
        "device": "cpu",
        "remarks": list(remarks),
        "guidance": [remark["text"] for remark in remarks],
    }


def remark(topic: str, text: str, optimizer: str = "") -> dict[str, Any]:
    """What a run remarks about itself, as its summary holds it."""
    return {"topic": topic, "text": text, "about": [], "optimizer": optimizer}


def write_run(
    folder: Path,
    made: list[dict[str, Any]],
    of: dict[str, Any],
    *,
    overrides: tuple[str, ...] = (),
    state: str = "finished",
    error: str | None = None,
    remarks: tuple[dict[str, Any], ...] = (),
    torn: bool = False,
    pid: int = NO_SUCH_PROCESS,
) -> Path:
    """A run folder. Only a run that finished, or was interrupted, has a summary."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(of, sort_keys=False))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    lines = "".join(json.dumps(strict(row)) + "\n" for row in made)
    if torn:
        lines += '{"train/step": 99999, "train/lo'
    (folder / "metrics.jsonl").write_text(lines)
    whole = state in ("finished", "interrupted")
    if whole and made:
        (folder / "summary.json").write_text(json.dumps(strict(summary(made, remarks)), indent=2))
    status = {
        "state": state,
        "exit_code": {"finished": 0, "failed": 1, "interrupted": 130}.get(state),
        "error": error,
        "rank": 0 if error else None,
        "config_hash": "0123456789abcdef",
        "started": "2026-11-21T04:00:00+00:00",
        "ended": "2026-11-21T04:00:12.5+00:00" if whole else None,
        "step": len(made),
        "wandb_run_id": "k3v9x0ab",
        "pid": pid,
        "host": socket.gethostname(),
    }
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def strict(value: Any) -> Any:
    """A record as strict JSON has it: numbers that are not finite as strings."""
    match value:
        case dict():
            return {key: strict(inner) for key, inner in value.items()}
        case list():
            return [strict(inner) for inner in value]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case _:
            return value


REQUEST = {
    "request": "fedcba9876543210",
    "objective": "eval/loss",
    "maximizes": False,
    "max_failures": None,
    "keys": ["clip", "clip.threshold"],
}
"""What ``sweep.json`` holds besides name, command and runs."""


def sweep(
    folder: Path,
    settings: list[tuple[str, float | None]],
    seeds: tuple[int, ...] = (0,),
    steps: int = 400,
    **options: Any,
) -> Path:
    """A sweep folder: one finished run for each setting and seed, and its ``sweep.json``."""
    number = 0
    entries = []
    for mode, threshold in settings:
        for seed in seeds:
            words = [f"clip={mode}"]
            words += [] if threshold is None else [f"clip.threshold={threshold}"]
            words += [f"seed={seed}"] if len(seeds) > 1 else []
            made = rows(mode, threshold, steps, seed=100 * seed + number, **options)
            of = config(clip__mode=mode, clip__threshold=threshold, seed=seed)
            never = remark("never", "The threshold clipped nothing.")
            write_run(
                folder / str(number),
                made,
                of,
                overrides=tuple(words),
                remarks=(never,) if threshold and not made[-1]["clip/ratio_total"] else (),
            )
            entries.append(
                {
                    "number": number,
                    "folder": str(number),
                    "overrides": words,
                    "words": words,
                    "state": "finished",
                    "exit_code": 0,
                    "error": None,
                    "objective": min(row.get("eval/loss", math.inf) for row in made),
                    "seconds": 12.5,
                    "config_hash": "0123456789abcdef",
                }
            )
            number += 1
    record = {
        "name": folder.name,
        "words": ["-m", "clip=norm", "clip.threshold=0.1,0.25,1.0,2.0"],
        **REQUEST,
        "total": number,
        "runs": entries,
        "started": "2026-11-21T04:00:00+00:00",
        "ended": "2026-11-21T04:02:00+00:00",
        "state": "finished",
    }
    (folder / "sweep.json").write_text(json.dumps(strict(record)))
    return folder


def rates(folder: Path, seeds: tuple[int, ...] = (0, 1), momenta: tuple[float, ...] = ()) -> Path:
    """A sweep over learning rate and threshold, and over momentum if there are several.

    The loss is best at a rate of 0.1. At 0.8, runs diverge that do not clip at 0.25.
    """
    number = 0
    for rate in (0.02, 0.1, 0.4, 0.8):
        for mode, threshold in (("norm", 0.25), ("norm", 1.0), ("none", None)):
            for momentum in momenta or (0.9,):
                for seed in seeds:
                    lost = 60 if rate == 0.8 and threshold != 0.25 else None
                    made = rows(mode, threshold, 120, seed=100 * seed + number, diverges_at=lost)
                    for row in made:
                        worse = abs(math.log(rate / 0.1)) * (0.06 + 0.1 * (1 - momentum))
                        for key in {"train/loss", "eval/loss"} & row.keys():
                            row[key] += worse
                    words = (f"clip={mode}", f"optimizer.lr={rate}", f"seed={seed}")
                    of = config(clip__mode=mode, clip__threshold=threshold, seed=seed)
                    of["optimizer"] |= {"lr": rate, "momentum": momentum}
                    write_run(folder / str(number), made, of, overrides=words)
                    number += 1
    return folder


NORM = [("norm", 0.1), ("norm", 0.25), ("norm", 1.0), ("norm", 2.0)]
MIXED = [
    *NORM,
    ("value", 0.01),
    ("value", 0.1),
    ("adaptive", 0.01),
    ("adaptive", 0.04),
    ("adaptive", 0.16),
    ("none", None),
]
LAYERS = (
    *(f"stage{i}.block{j}.conv.weight" for i in range(4) for j in range(3)),
    "head.weight",
    "head.bias",
)
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>"


def troubled(folder: Path) -> Path:
    """A sweep in which runs finished, diverged, failed, were killed, go on, and never began."""
    sweep(folder, [*NORM[1:3], ("none", None)], seeds=(0, 1), what_if=(0.1, 0.5, 1.0))
    lost = rows("norm", 8.0, 300, seed=5, diverges_at=180)
    many = config(clip__threshold=8.0, model__name=HOSTILE)
    write_run(folder / "6", lost, many, overrides=("clip.threshold=8.0", f"+model.name={HOSTILE}"))
    cause = f"RuntimeError: {HOSTILE}"
    part = rows("norm", 4.0, 300, seed=6)[:120]
    write_run(
        folder / "7",
        part,
        config(clip__threshold=4.0),
        state="failed",
        error=f"Traceback (most recent call last):\n  ...\n{cause}",
        overrides=("clip.threshold=4.0",),
    )
    write_run(
        folder / "8",
        part[:77],
        config(clip__threshold=2.0),
        state="running",
        torn=True,
        overrides=("clip.threshold=2.0",),
    )
    record = json.loads((folder / "sweep.json").read_text())
    words = ["clip.threshold=16.0"]
    planned = {"number": 9, "folder": "9", "overrides": words, "words": words}
    record["runs"].append({**planned, "config_hash": "", "state": "waiting"})
    (folder / "sweep.json").write_text(json.dumps(record))
    return folder


def main(folder: Path) -> None:
    """One example of each kind."""
    sweep(folder / "norm", [*NORM, ("none", None)], seeds=(0, 1, 2), layers=LAYERS)
    sweep(folder / "mixed", MIXED, steps=600, what_if=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
    troubled(folder / "troubled")
    rates(folder / "rates")
    rates(folder / "keys", seeds=(0,), momenta=(0.0, 0.9))
    write_run(
        folder / "one",
        rows("norm", 1.0, 500, layers=LAYERS),
        config(),
        overrides=("clip=norm", "clip.threshold=1.0"),
        remarks=(remark("limits", "The threshold 1 clipped 62 % of the steps.", "SGD"),),
    )
    (folder / "none").mkdir()
    empty = {"name": "none", "words": [], **REQUEST, "total": 0, "runs": []}
    (folder / "none" / "sweep.json").write_text(json.dumps(empty))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
