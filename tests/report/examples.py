"""Folders as runs and sweeps leave them, with plausible made-up values."""

import json
import math
import socket

import numpy as np
import yaml

from runner.run_folder.status import Entry, SweepRecord, changed
from runner.run_folder.strict_json import encode

# A process that cannot be: beyond any machine's highest number.
NO_SUCH_PROCESS = 2**22 + 12345


def config(**changes):
    """A resolved configuration; ``section__key=value`` changes one key."""
    whole = {"seed": 0, "clip": {"mode": "norm", "threshold": 1.0, "exclude": "auto"}}
    whole |= {"model": {"_target_": "runner.models.cnn", "width": 32}, "log": {"interval": 1}}
    whole |= {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05}, "tracker": {"tags": []}}
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        whole[section] = {**whole[section], inner: value} if inner else value
    return whole


def rows(mode="norm", threshold=1.0, steps=400, seed=0, diverges_at=None, **options):
    """Rows of ``metrics.jsonl``, one a step; numbers that are not finite as Python has them."""
    usual = {"evaluations": 10, "layers": (), "what_if": ()}
    evaluations, layers, what_if = (usual | options).values()
    random = np.random.default_rng(seed)
    numbers = np.arange(1, steps + 1)
    norm = (0.35 + 1.8 * np.exp(-numbers / (0.25 * steps))) * np.exp(random.normal(0, 0.35, steps))
    norm[random.integers(0, steps, max(1, steps // 90))] *= 12
    limit = threshold or math.inf
    after = np.minimum(norm, limit)
    after = after if mode == "norm" else 0.9 * norm + 0.1 * after  # of elements and units, less
    floor = 0.1 + 0.12 * abs(math.log10((threshold or 30) / 0.6)) * (0.3 if mode != "norm" else 1)
    loss = floor + 2.2 * np.exp(-numbers / (0.18 * steps))
    loss = loss * np.exp(random.normal(0, 0.09, steps))
    if diverges_at is not None:
        grow = np.arange(steps - diverges_at)
        loss[diverges_at:] = np.where(grow < 12, loss[diverges_at - 1] * 2.0**grow, np.nan)
        norm[diverges_at:] = np.where(grow < 12, norm[diverges_at - 1] * 3.0**grow, np.nan)
        after[diverges_at:] = np.where(grow < 12, after[diverges_at:], np.nan)
    clipped = (norm > after).astype(int)
    columns = {
        "train/step": numbers,
        "train/loss": loss,
        "grad/norm": norm,
        "grad/norm_clipped": after,
    }
    columns |= {"clip/ratio_total": np.cumsum(clipped) / numbers, "clip/coef": after / norm}
    columns |= dict.fromkeys(("clip/fraction", "clip/ratio"), clipped / 1)
    columns |= {"grad/nonfinite": np.cumsum(~np.isfinite(norm))}
    columns |= {} if threshold is None else {"clip/threshold": np.full(steps, threshold)}
    times = 1 if mode == "norm" else 4
    columns |= {f"clip/what_if/{x}": np.cumsum(norm > x * times) / numbers for x in what_if}
    of_layer = random.dirichlet(np.ones(max(len(layers), 1)), steps) ** 0.5 * norm[:, None]
    columns |= {f"grad/norm/{name}": of_layer[:, j] for j, name in enumerate(layers)}
    by_step = zip(*(column.tolist() for column in columns.values()), strict=True)
    records = [dict(zip(columns, values, strict=True)) for values in by_step]
    every = max(1, steps // evaluations) if evaluations else steps + 1
    for row in records[every - 1 :: every]:
        lost = not math.isfinite(row["train/loss"])
        row["eval/loss"] = row["train/loss"] * 1.1
        row["eval/accuracy"] = 0.1 if lost else 1 / (1 + row["train/loss"])
    return records


def summary(made):
    """What a run that came to its end writes of itself."""
    norms = np.asarray([row["grad/norm"] for row in made])
    finite = norms[np.isfinite(norms)]
    points = zip(("p50", "p90", "p95", "p99"), np.percentile(finite, (50, 90, 95, 99)), strict=True)
    final = {key: value for row in made for key, value in row.items() if key != "train/step"}
    best = {}
    for key, better in (("train/loss", min), ("eval/loss", min), ("eval/accuracy", max)):
        logged = [row[key] for row in made if not math.isnan(row.get(key, math.nan))]
        best |= {key: better(logged)} if logged else {}
    norm = {name: float(point) for name, point in points} | {"max": float(finite.max())}
    whole = {"final": final, "best": best, "grad/norm": norm, "steps": len(made)}
    whole |= {key: made[-1][key] for key in ("clip/ratio_total", "grad/nonfinite")}
    return whole | {"wall_s": 0.031 * len(made), "world_size": 1, "device": "cpu"}


def write_run(folder, made, of, *, overrides=(), state="finished", error=None, torn=False):
    """A run folder. Only a run that finished, or was interrupted, has a summary."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(of, sort_keys=False))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    lines = "".join(encode(row) + "\n" for row in made)
    if torn:
        lines += '{"train/step": 99999, "train/lo'
    (folder / "metrics.jsonl").write_text(lines)
    whole = state in ("finished", "interrupted")
    if whole and made:
        (folder / "summary.json").write_text(encode(summary(made)))
    status = {"state": state, "error": error, "step": len(made), "wall_s": 12.5}
    status |= {"pid": NO_SUCH_PROCESS, "host": socket.gethostname()}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def sweep(folder, settings, seeds=(0,), steps=400, **options):
    """A sweep folder: one finished run for each setting and seed, and its ``sweep.json``."""
    entries = []
    for mode, threshold in settings:
        for seed in seeds:
            number = len(entries)
            words = [f"clip={mode}"]
            words += [] if threshold is None else [f"clip.threshold={threshold}"]
            words += [f"seed={seed}"] if len(seeds) > 1 else []
            lines = rows(mode, threshold, steps, seed=100 * seed + number, **options)
            settings_of_run = config(clip__mode=mode, clip__threshold=threshold, seed=seed)
            write_run(folder / str(number), lines, settings_of_run, overrides=tuple(words))
            best = min(row.get("eval/loss", math.inf) for row in lines)
            finished = {"state": "finished", "exit_code": 0, "objective": best, "seconds": 12.5}
            entries.append(Entry(number, str(number), words, words, "0123abcd", **finished))
    about = {"request": "fedcba98", "objective": "eval/loss", "maximizes": False}
    about |= {"words": ["-m", "clip=norm", "clip.threshold=0.1,0.25,1.0,2.0"], "keys": ["clip"]}
    about |= {"total": len(entries), "state": "finished", "max_failures": None}
    SweepRecord(folder.name, **about, entries=entries).write(folder)
    return folder


def trained(folder, losses, state="finished", steps=40, layers=(), **changes):
    """Runs of thresholds (and rates) with the last loss of each seed; NaN for one that diverged."""
    number = 0
    for setting, of_seeds in losses.items():
        threshold, rate = setting if isinstance(setting, tuple) else (setting, 0.05)
        mode = "norm" if threshold else "none"
        for seed, loss in enumerate(of_seeds):
            seed, loss = loss if isinstance(loss, tuple) else (seed, loss)
            options = {"diverges_at": 20 if loss != loss else None, "layers": layers}
            lines = rows(mode, threshold, steps, seed=number, evaluations=0, **options)
            if loss == loss:
                lines[steps // 2 - 1]["eval/loss"] = loss + 0.1
            lines[-1] |= {"eval/loss": loss if loss == loss else 0.01, "eval/accuracy": loss}
            keys = {"clip__mode": mode, "clip__threshold": threshold, "optimizer__lr": rate}
            words = (f"clip={mode}", f"clip.threshold={threshold}", f"seed={seed}")
            settings_of_run = config(**keys, seed=seed, **changes)
            write_run(folder / str(number), lines, settings_of_run, overrides=words, state=state)
            number += 1
    return folder


NORM = [("norm", 0.1), ("norm", 0.25), ("norm", 1.0), ("norm", 2.0)]
MIXED = [
    *(*NORM, ("value", 0.01), ("value", 0.1), ("none", None)),
    *(("adaptive", threshold) for threshold in (0.01, 0.04, 0.16)),
]
CONVOLUTIONS = (f"stage{i}.block{j}.conv.weight" for i in range(2) for j in range(2))
LAYERS = (*CONVOLUTIONS, "head.weight", "head.bias")
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>"


def troubled(folder):
    """A sweep in which runs finished, diverged, failed, were killed, go on, and never began."""
    sweep(folder, [*NORM[1:3], ("none", None)], seeds=(0, 1), what_if=(0.1, 0.5, 1.0))
    lost = rows("norm", 8.0, 300, seed=5, diverges_at=180)
    many = config(clip__threshold=8.0, model__name=HOSTILE)
    write_run(folder / "6", lost, many, overrides=("clip.threshold=8.0", f"+model.name={HOSTILE}"))
    part = rows("norm", 4.0, 300, seed=6)[:120]
    failed = {"state": "failed", "overrides": ("clip.threshold=4.0",)}
    error = f"Traceback (most recent call last):\n  ...\nRuntimeError: {HOSTILE}"
    write_run(folder / "7", part, config(clip__threshold=4.0), error=error, **failed)
    torn = {"state": "running", "torn": True, "overrides": ("clip.threshold=2.0",)}
    write_run(folder / "8", part[:77], config(clip__threshold=2.0), **torn)
    with changed(folder) as record:
        words = ["clip.threshold=16.0"]
        record.entries.append(Entry(9, "9", words, words, ""))
    return folder
