"""Record a sweep as a run of wandb: the figures of its page, and its best setting."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from runner.config.schema import RunConfig
from runner.config.secrets import masked_words
from runner.launch import signals
from runner.run_folder.sweep_record import SweepRecord
from runner.sweep.job import grouped
from runner.telemetry.sinks.wandb_sink import SWEEP_JOB_TYPE, WandbSink, records

log = logging.getLogger("runner.wandb")


def record_sweep(folder: Path, config: RunConfig) -> None:
    """Record a sweep with wandb if its runs are recorded there and have figures."""
    if not config.tracker.uses("wandb") or not records(config.tracker.mode):
        return
    try:
        _record(folder, config)
    except Exception as error:
        log.warning("wandb records nothing of the sweep: %r", error)


def _record(folder: Path, config: RunConfig) -> None:
    from runner import report
    from runner.report.charts import sections
    from runner.report.findings import find

    found, record = find(report.read(folder)), SweepRecord.read(folder)
    figures = {
        f"sweep/{one.key}": _readable(json.loads(one.figure.to_json()))
        for _, charts, _ in sections(found)
        for one in charts
    }
    if not figures:
        return
    summary: dict[str, Any] = {"runs": len(found.sweep.runs)}
    if found.best is not None:
        summary["best"] = {"setting": found.best.label, found.metric: found.mean(found.best)[0]}
    tracker = config.tracker.model_dump(exclude={"name", "also"})
    sink = WandbSink(
        folder,
        **grouped({"tracker": tracker}, record.name)["tracker"] | {"job_type": SWEEP_JOB_TYPE},
        name=record.name,
        # The same when more of its runs are done.
        run_id=hashlib.sha256(f"{record.name} {record.started}".encode()).hexdigest()[:16],
        config={"command": masked_words(record.words), "keys": record.keys},
        resumes=True,
        time_left=signals.time_left,
    )
    sink.draw(figures)
    sink.close(summary, int(record.state != "finished"))


def _readable(value: Any) -> Any:
    """Return a figure with lists for plotly's bytes, which only its latest versions read."""
    import numpy as np

    match value:
        case {"dtype": dtype, "bdata": data}:
            flat = np.frombuffer(base64.b64decode(data), dtype)
            numbers = flat.astype(object)
            numbers[~np.isfinite(flat)] = None
            sizes = value.get("shape", str(len(flat))).split(",")
            return numbers.reshape([int(size) for size in sizes]).tolist()
        case dict():
            return {key: _readable(inner) for key, inner in value.items()}
        case list():
            return [_readable(inner) for inner in value]
        case _:
            return value
